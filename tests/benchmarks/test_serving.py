"""What the serving benchmark makes of its runs: goals against peers that ran or not, and runs kept in a folder."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.completions import Ask, Outcome
from benchmarks.report import Figure
from benchmarks.serving import config
from benchmarks.serving_bounds import causal_flops
from benchmarks.serving_figures import figures_of
from benchmarks.serving_goals import interference_goals
from benchmarks.serving_runs import MAX_AGE_S, Run, keep, kept
from benchmarks.systems import Processes, on_cores
from benchmarks.workloads import Phase
from pdserve.engine.ledger import Step, ledger
from tests.engine.tiny import spec


def outcome(kind: str, prompt: int, first_s: float, gap_s: float, tokens: int = 5, sent: float = 0.0) -> Outcome:
    arrivals = [(sent + first_s + gap_s * number, 1) for number in range(tokens)]
    return Outcome(Ask(kind, (0,) * prompt, tokens), sent, arrivals)


def phase(steady_s: float, long_s: float, gap_s: float) -> Phase:
    outcomes = outcome("steady", 64, steady_s, gap_s), outcome("long", 1800, long_s, 0.0, tokens=1)
    return Phase(outcomes, 0.0, 10.0)


def interfered(system: str, steady_s: float = 0.4, long_s: float = 2.0, gap_s: float = 0.05) -> Run:
    made = phase(steady_s, long_s, gap_s)
    return Run("interference", system, 1, (made, made), cores={"router": 0.25, "decode": 1.0})


def goals(*runs: Run) -> dict[str, Figure]:
    found = interference_goals({run.system: run.phases for run in runs})
    return {figure.name.removeprefix("interference goal: "): figure for figure in found}


def test_without_peers_nothing_is_met_or_missed_but_the_ratio_to_itself() -> None:
    found = goals(interfered("a"))
    assert [name for name, figure in found.items() if figure.met is not None] == [
        "inter-token p99, against the same before the long prompts"
    ]
    assert not goals(interfered("c"))


def test_the_disaggregated_peer_is_one_servers_figures_times_the_tables_ratio() -> None:
    found = goals(interfered("a", long_s=3.2), interfered("c", long_s=2.2))
    long = found["TTFT p50 of long prompts, against vLLM P/D (the table's ratio to one server)"]
    assert long.peer == pytest.approx(2.2 * 5.4 / 2.0) and long.goal == 0.6 and long.met
    p99 = found["inter-token p99, against vLLM P/D (the table's ratio to one server)"]
    assert p99.peer == pytest.approx(50 * 62 / 1950) and p99.met is False
    rate = found["tokens per second, against the best peer (two servers, the table's ratio to one server)"]
    assert rate.peer == pytest.approx(0.6 * 112 / 90)


def test_a_peer_that_runs_badly_here_helps_nobody_and_one_that_runs_well_counts() -> None:
    one = interfered("c", steady_s=0.43)
    starved = goals(interfered("a"), one, interfered("d", steady_s=48.0))
    assert starved["TTFT p50 of steady streams, against vLLM P/D (the table's ratio to one server)"].peer == 5.0
    well = goals(interfered("a"), one, interfered("d", steady_s=0.3))
    assert well["TTFT p50 of steady streams, against vLLM P/D (as it ran here)"].peer == pytest.approx(0.3)


def poisson(system: str, rate: float, *first_s: float, seed: int = 1) -> Run:
    outcomes = tuple(outcome("poisson", 128, seconds, 0.05) for seconds in first_s)
    return Run("poisson", system, seed, (Phase(outcomes, 0.0, 60.0),), rate)


def test_goodput_is_over_all_seeds_and_against_the_best_of_the_others() -> None:
    runs = [poisson("a", 0.6, 1.0, 1.0, 3.0), poisson("a", 0.6, 1.0, seed=2)]
    runs += [poisson("b", 0.6, *[1.0] * 4), poisson("c", 0.6, 1.0, 9.0), poisson("c", 1.0, 1.0)]
    found = {figure.name: figure for figure in figures_of(runs)}
    mine = found["Poisson goal 0.6/s: goodput, pdserve, disaggregated, against the best of b and c"]
    assert mine.value == pytest.approx(3 / 120) and mine.peer == pytest.approx(4 / 60) and mine.met is False
    assert found["Poisson 0.6/s, pdserve, disaggregated: seeds"].value == 2
    assert found["Poisson 0.6/s, vLLM, one server: prompts of 128 tokens within the objectives"].value == 0.5


def test_predictions_are_told_of_those_that_were_measured() -> None:
    run = interfered("a")
    steady, long = run.phases[-1].outcomes
    steady.record = {"placement": "decode", "placement_reason": "cheaper", "first_token_ms": 300.0}
    steady.record |= {"predicted_decode_ms": 200.0, "predicted_handoff_ms": 900.0}
    long.record = {"placement": "handoff", "placement_reason": "unmeasured", "first_token_ms": 5.0}
    long.record |= {"predicted_decode_ms": 1.0, "predicted_handoff_ms": 1.0}
    found = {figure.name: figure.value for figure in figures_of([run])}
    title = "interference, pdserve, disaggregated"
    assert found[f"{title}: prompts computed by the decode worker"] == 0.5
    assert found[f"{title}: prompts computed by both workers together"] == 0.0
    assert found[f"{title}: time to first token over the predicted, median"] == 1.5
    assert found[f"{title}: processor time"] == 1.25


def test_kept_runs_come_back_whole_and_old_or_foreign_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(interfered("a"), settings="decode.step_ms = 32")
    run.phases[0].outcomes[0].record = {"placement": "decode"}
    keep(tmp_path, run)
    keep(tmp_path, poisson("b", 0.6, 1.0, 2.0))
    assert kept(tmp_path) == [run, poisson("b", 0.6, 1.0, 2.0)]
    for name, wrong in (("made", -MAX_AGE_S), ("machine", "another"), ("format", 0)):
        file = tmp_path / "interference-a-seed1.json"
        content = json.loads(file.read_text())
        content[name] = content[name] + wrong if name == "made" else wrong
        file.write_text(json.dumps(content))
        assert [left.system for left in kept(tmp_path)] == ["b"]
        assert "left out" in capsys.readouterr().err
        keep(tmp_path, run)


def test_the_bound_counts_no_key_that_a_query_does_not_see() -> None:
    shape = spec(layers=3)
    causal = causal_flops(shape, 256)
    whole = ledger(shape, Step(1, 256), "bf16").flops
    pairs = 4 * shape.layers * shape.heads * shape.head_dim  # FLOPs of a query and a key: score, and weighted sum
    assert whole - causal == pairs * (256 * 256 - sum(32 * end for end in range(32, 257, 32)))


def test_settings_of_the_caller_go_into_their_sections() -> None:
    made = tomllib.loads(config("m", 1, "auto", {"decode.step_ms": "32", "engine.threads": "2"}))
    assert made["decode"] == {"step_ms": 32} and made["router"] == {"disaggregate": "auto"}
    assert made["engine"]["threads"] == 2 and made["model"]["path"] == "m"


async def test_a_process_gets_the_cores_it_was_given_and_this_one_keeps_its_own() -> None:
    mine = os.sched_getaffinity(0)
    processes = Processes()
    try:
        told = "import os, time; print(f'cores {sorted(os.sched_getaffinity(0))}', flush=True); time.sleep(60)"
        with on_cores([min(mine)]):
            await processes.start("child", [sys.executable, "-c", told])
        assert (await processes.prints("child", r"cores (.*)\n"))[1] == str([min(mine)])
        assert os.sched_getaffinity(0) == mine
    finally:
        await processes.stop()
