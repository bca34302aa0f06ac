"""What `benchmarks.serving` tells of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.completions import Outcome
from benchmarks.report import Figure
from benchmarks.serving_goals import interference_goals, poisson_goals
from benchmarks.serving_runs import Run
from benchmarks.workloads import Phase, Poisson, goodput, meets, spread

LABELS = {
    "a": "pdserve, disaggregated",
    "b": "pdserve, one process",
    "c": "vLLM, one server",
    "c256": "vLLM, one server, 256-token budget",
    "d": "vLLM P/D over NIXL",
}


def figures_of(runs: Iterable[Run]) -> list[Figure]:
    """In the order of LABELS; of several interference runs of a system the last one."""
    runs = sorted(runs, key=lambda run: list(LABELS).index(run.system))
    interfered = {run.system: run for run in runs if run.workload == "interference"}
    figures = [figure for run in interfered.values() for figure in _interference(run)]
    figures += interference_goals({name: run.phases for name, run in interfered.items()})
    rated: dict[float, dict[str, list[Run]]] = {}
    for run in sorted((run for run in runs if run.workload == "poisson"), key=lambda run: run.rate):
        rated.setdefault(run.rate, {}).setdefault(run.system, []).append(run)
    figures += [figure for same in rated.values() for own in same.values() for figure in _poisson(own)]
    goods = {
        rate: {
            name: goodput([phase for run in own for phase in run.phases], Poisson(rate)) for name, own in same.items()
        }
        for rate, same in rated.items()
    }
    return figures + poisson_goals(goods, LABELS)


def _interference(run: Run) -> list[Figure]:
    idle, busy = run.phases
    title = f"interference, {LABELS[run.system]}"
    figures = _latencies(title, busy, "steady") + _latencies(f"{title}, long prompts", busy, "long", gaps=False)
    alone = spread(idle.gaps("steady"))
    if alone:
        figures.append(Figure(f"{title}: inter-token p99 before the long prompts", 1000 * alone["p99"], "ms"))
    figures.append(Figure(f"{title}: tokens per second", busy.tokens_per_s, "tokens/s"))
    figures.append(Figure(f"{title}: failed requests", len(busy.failures), "requests"))
    return figures + _placement(title, busy.outcomes) + _cores(title, [run])


def _poisson(runs: Sequence[Run]) -> list[Figure]:
    """Of one system and rate, over all seeds."""
    phases = [phase for run in runs for phase in run.phases]
    outcomes = tuple(outcome for phase in phases for outcome in phase.outcomes)
    merged = Phase(outcomes, min(phase.begin for phase in phases), max(phase.end for phase in phases))
    plan = Poisson(runs[0].rate)
    title = f"Poisson {plan.rate:g}/s, {LABELS[runs[0].system]}"
    figures = [Figure(f"{title}: seeds", len(runs), "runs")]
    for size in sorted({len(outcome.ask.prompt) for outcome in outcomes}):
        same = [outcome for outcome in outcomes if len(outcome.ask.prompt) == size]
        share = sum(meets(outcome, plan) for outcome in same) / len(same)
        figures.append(Figure(f"{title}: prompts of {size:,} tokens within the objectives", share, "of all"))
        quickest = [outcome.first_token_s for outcome in same if outcome.arrivals]
        if quickest:
            figures.append(Figure(f"{title}: prompts of {size:,} tokens, shortest TTFT", min(quickest), "s"))
    figures += _latencies(title, merged, "poisson")
    figures.append(Figure(f"{title}: failed requests", len(merged.failures), "requests"))
    return figures + _placement(title, outcomes) + _cores(title, runs)


def _latencies(title: str, phase: Phase, kind: str, gaps: bool = True) -> list[Figure]:
    """Percentiles of the time to first token and of the time between tokens."""
    figures = [Figure(f"{title}: TTFT {name}", value, "s") for name, value in spread(phase.first_tokens(kind)).items()]
    if gaps:
        found = spread(phase.gaps(kind)).items()
        figures += [Figure(f"{title}: inter-token {name}", 1000 * value, "ms") for name, value in found]
    return figures


def _placement(title: str, outcomes: Iterable[Outcome]) -> list[Figure]:
    """Where prompts were computed and how well that was foreseen, for systems that tell."""
    records = [outcome.record for outcome in outcomes if outcome.record]
    if not records:
        return []
    where = [record["placement"] for record in records]
    figures = [
        Figure(f"{title}: prompts computed by {who}", where.count(name) / len(where), "of all")
        for name, who in (("decode", "the decode worker"), ("split", "both workers together"))
    ]
    ratios = [
        record["first_token_ms"] / predicted
        for record in records
        if record["placement_reason"] != "unmeasured"
        and (predicted := record[f"predicted_{record['placement']}_ms"]) > 0
        and record["first_token_ms"] > 0
    ]
    if ratios:
        figures.append(Figure(f"{title}: time to first token over the predicted, median", median(ratios), "times"))
    return figures


def _cores(title: str, runs: Sequence[Run]) -> list[Figure]:
    """Processor time of everything that took part, in cores."""
    return [Figure(f"{title}: processor time", sum(sum(run.cores.values()) for run in runs) / len(runs), "cores")]
