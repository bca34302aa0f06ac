"""What the soak and the overload command make of what they see: answers, growth, rests, and the way back."""

from __future__ import annotations

import os
import random
import socket
import tempfile
import tomllib
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import overload, overload_figures, soak, soak_figures
from benchmarks.completions import Ask, Outcome
from benchmarks.report import Figure
from benchmarks.soak_house import Kill
from benchmarks.soak_questions import TINY, Output
from benchmarks.soak_traffic import COMPLETE, DIFFERENT, FAILED, LEFT, UNTYPED, fits
from benchmarks.soak_traffic import Outcome as Asked
from benchmarks.soak_watch import MIB, Sample, Watch, growth, sample
from benchmarks.workloads import Phase
from cache_transfer.shared import Ring
from pdserve.config import load_config

WHOLE = (Output((1, 2, 3), "abc"), Output((4, 5), "de"))


def test_an_answer_that_is_left_early_must_be_how_the_right_one_begins() -> None:
    assert fits(WHOLE, WHOLE, partly=False)
    begun = (Output((1, 2), "ab"), Output((), ""))
    assert fits(begun, WHOLE, partly=True) and not fits(begun, WHOLE, partly=False)
    assert not fits((Output((1, 3), "ac"), Output((), "")), WHOLE, partly=True)
    assert not fits((*WHOLE, Output((), "")), WHOLE, partly=True)


@pytest.mark.parametrize(("slope", "noise"), [(0.0, 0.0), (2.0, 0.0), (0.0, 1.0), (-3.0, 0.5), (1.0, 1.0)])
def test_growth_is_the_slope_per_minute_and_sure_only_beyond_its_bound(slope: float, noise: float) -> None:
    drawn = random.Random(1)
    points = [(float(at), 100.0 + slope * at / 60 + drawn.gauss(0, noise)) for at in range(0, 1200, 3)]
    found = growth(points)
    assert found.slope == pytest.approx(slope, abs=0.1) and abs(found.slope - slope) <= found.bound + 1e-9
    assert (found.sure > 0) is (slope > 0)
    assert found.in_ten_minutes == pytest.approx(10 * found.sure)
    short = growth(points[:60])  # three minutes
    assert short.in_ten_minutes == pytest.approx(short.sure * 177 / 60)


def test_what_a_process_takes_while_it_warms_up_is_no_growth() -> None:
    watch = Watch(dict, every_s=1.0)
    watch.samples["router.0"] = [Sample(float(at), MIB * min(at, 200), 20, 9) for at in range(600)]
    watch.samples["d0.3"] = watch.samples["router.0"][:90]
    found = watch.grown("router.0")
    assert found is not None and found.slope == 0.0 and found.level == 200 * MIB
    assert watch.grown("d0.3") is None, "it did not live long enough"


def test_a_descriptor_that_is_never_given_back_is_found_among_those_that_come_and_go() -> None:
    drawn, watch = random.Random(2), Watch(dict, every_s=3.0)

    def life(leaks_per_minute: float) -> list[Sample]:
        """Ten are made in the first minute; up to six more belong to requests."""
        found = []
        for at in range(0, 1200, 3):
            sockets = 10 + min(10, at // 6) + int(leaks_per_minute * at / 60) + drawn.randrange(6)
            found.append(Sample(float(at), MIB, sockets + 5, 12, {"socket": sockets, "thread python": 12}))
        return found

    watch.samples = {"p0.0": life(0.0), "p1.0": life(1.0), "d0.0": life(0.0)[:30]}
    flat, leaks = watch.gained("p0.0"), watch.gained("p1.0")
    assert flat is not None and abs(flat.descriptors) <= 1 and flat.threads == 0
    assert leaks is not None and leaks.descriptors >= 8 and leaks.kinds["socket"] == leaks.descriptors
    assert watch.gained("d0.0") is None, "it did not live long enough"


def test_a_process_is_seen_with_what_it_holds() -> None:
    before = sample(os.getpid())
    assert before is not None and before.threads >= 1 and sample(2**22 + 1) is None
    with socket.socket(), tempfile.TemporaryFile(), closing(Ring(4096, 4096)):
        during = sample(os.getpid())
    assert during is not None and during.kinds["socket"] == before.kinds.get("socket", 0) + 1
    assert during.rings - before.rings == soak_figures.RING_DESCRIPTORS
    assert during.descriptors == before.descriptors + 2
    assert sum(during.kinds.values()) == during.descriptors + during.rings + during.threads


def seen(*ends: tuple[str, str]) -> soak_figures.Soak:
    outcomes = [Asked("plain", "grpc", "amber", 1.0, 2.0, end, reason, tokens=5) for end, reason in ends]
    rests = [soak_figures.Rest(float(at), 0, 0.1, (), {"router.0": 30}, {"p0.0": 8}) for at in range(3)]
    return soak_figures.Soak(outcomes, rests, began=0.0, ended=60.0)


def figures(of: soak_figures.Soak) -> dict[str, Figure]:
    house = Namespace(kills=[Kill("p0", "SIGKILL", 1.0, ready_after_s=3.0)], unasked=[])
    made = soak_figures.figures_of(of, Watch(dict, 1.0), house, Namespace(done=0))  # type: ignore[arg-type]
    return {figure.name: figure for figure in made}


def test_requests_that_callers_leave_are_not_held_against_the_service() -> None:
    found = figures(seen(*[(COMPLETE, "")] * 19, (FAILED, "WORKER_LOST"), *[(LEFT, "")] * 10))
    share = found["complete, of those that were to complete"]
    assert share.value == 0.95 and share.met
    assert found["failed: WORKER_LOST"].value == 1 and found["failed without a typed error"].met
    assert not any(figure.met is False for figure in found.values())


@pytest.mark.parametrize("end", [(DIFFERENT, ""), (FAILED, UNTYPED)])
def test_one_wrong_answer_or_one_untyped_error_misses_a_goal(end: tuple[str, str]) -> None:
    assert any(figure.met is False for figure in figures(seen(*[(COMPLETE, "")] * 99, end)).values())


def test_their_deployments_are_configurations(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text(soak.config(tmp_path / "model", tmp_path / "adapters", TINY))
    read = load_config(file).router
    assert [tenant.name for tenant in read.tenants] == list(soak.KEYS) and read.operators == (soak.OPERATOR,)
    file.write_text(overload.config(Namespace(quick=True, model=tmp_path, max_wait_s=2.5, max_batch=8)))
    assert load_config(file).router.max_wait_s == 2.5
    assert tomllib.loads(file.read_text())["engine"]["deterministic"]


def outcome(sent: float, first_s: float, status: int = 0, tenant: str = "birch") -> Outcome:
    arrivals = [] if status else [(sent + first_s, 1), (sent + first_s + 0.1, 1)]
    refused = {"error": "refused", "status": status, "retry_after_s": 1.0} if status else {}
    return Outcome(Ask(tenant, (1,), 2), sent, arrivals, **refused)  # type: ignore[arg-type]


def test_recovery_lasts_until_the_last_request_that_was_refused_or_late() -> None:
    before = Phase(tuple(outcome(float(at), 1.0) for at in range(10)), 0.0, 10.0)
    flood = Phase((*before.outcomes, *(outcome(5.0, 0.0, 429, "amber") for _ in range(9))), 0.0, 10.0)
    after = Phase((outcome(10.5, 0.0, 429), outcome(13.0, 1.6), outcome(14.0, 1.4)), 10.0, 20.0)
    measured = overload_figures.Measured(1.0, before, flood, after)
    assert measured.recovered_s == 3.0
    found = {figure.name: figure for figure in overload_figures.figures_of(measured)}
    assert found["overload: refused, of the tenant that floods"].value == 1.0
    assert found["overload: taken, of birch's requests"].met
    assert found["refusals that say when to come again"].value == 1.0
