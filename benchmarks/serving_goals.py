"""What `benchmarks.serving` wants of system a, and of whom it wants it.

vLLM's own disaggregation (d) starves on two cores unless it is tuned by hand. So its figures here are those of the
one vLLM server that ran in the same call, times the ratio of both in the table below, which was measured on another
machine of two cores after such tuning; where d runs, too, and does better, that counts. The figures' names say which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.report import Figure
from benchmarks.workloads import Phase, spread

P99_OVER_IDLE = 1.3
TOKENS = 1.1


@dataclass(frozen=True)
class Known:
    """One row of the table: milliseconds between tokens, seconds to the first one (p50), tokens per second."""

    p99: float
    max: float
    long: float
    steady: float
    tokens: float


ONE_SERVER = Known(1950, 2280, 2.0, 0.43, 90)
TWO_SERVERS = Known(109, 3706, 3.6, 0.15, 112)  # one thread each, requests in turn
DISAGGREGATED = Known(62, 200, 5.4, 5.0, 101)


@dataclass(frozen=True)
class Peer:
    value: float | None
    how: str


def interference_goals(found: Mapping[str, tuple[Phase, ...]]) -> list[Figure]:
    """Goals of a; those for a ratio to a system that did not run stay without a verdict."""
    if "a" not in found:
        return []
    idle, busy = found["a"]
    mine, alone = numbers(busy), spread(idle.gaps("steady"))
    figures = []
    for key, title, unit, goal in (
        ("p99", "inter-token p99", "ms", 1.0),
        ("max", "inter-token maximum", "ms", 1.0),
        ("long", "TTFT p50 of long prompts", "s", 0.6),
        ("steady", "TTFT p50 of steady streams", "s", 0.2),
    ):
        if key in mine:
            peer = disaggregated(found, key)
            name = f"interference goal: {title}, against vLLM P/D ({peer.how})"
            figures.append(Figure(name, mine[key], unit, peer.value, goal, at_most=True, relative=True))
    if alone and "p99" in mine:
        title = "interference goal: inter-token p99, against the same before the long prompts"
        figures.append(Figure(title, mine["p99"], "ms", 1000 * alone["p99"], P99_OVER_IDLE, at_most=True))
    best = best_rate(found)
    title = f"interference goal: tokens per second, against the best peer ({best.how})"
    figures.append(Figure(title, mine["tokens"], "tokens/s", best.value, TOKENS, relative=True))
    return figures


def disaggregated(found: Mapping[str, tuple[Phase, ...]], key: str) -> Peer:
    """The harder one of d by the table and d as it ran here, of figures where less is better."""
    table = "the table's ratio to one server"
    measured = numbers(found["d"][-1]).get(key) if "d" in found else None
    if "c" not in found:
        return Peer(measured, "as it ran here") if measured is not None else Peer(None, table)
    one = numbers(found["c"][-1])[key]
    expected = one * getattr(DISAGGREGATED, key) / getattr(ONE_SERVER, key)
    return Peer(measured, "as it ran here") if measured is not None and measured < expected else Peer(expected, table)


def best_rate(found: Mapping[str, tuple[Phase, ...]]) -> Peer:
    """Tokens per second of the best peer that ran, or would by the table."""
    rates = {name: phases[-1].tokens_per_s for name, phases in found.items() if name not in ("a", "b")}
    if "c" in rates:
        for name, row in (("two servers", TWO_SERVERS), ("P/D", DISAGGREGATED)):
            rates[f"{name}, the table's ratio to one server"] = rates["c"] * row.tokens / ONE_SERVER.tokens
    if not rates:
        return Peer(None, "none ran")
    name = max(rates, key=lambda name: rates[name])
    return Peer(rates[name], {"c": "one server", "c256": "256-token budget", "d": "P/D"}.get(name, name))


def numbers(phase: Phase) -> dict[str, float]:
    """By the names of `Known`; of what the phase does not have nothing."""
    made = {name: 1000 * value for name, value in spread(phase.gaps("steady")).items()}
    for kind in ("long", "steady"):
        first = spread(phase.first_tokens(kind))
        if first:
            made[kind] = first["p50"]
    return {**made, "tokens": phase.tokens_per_s}


def poisson_goals(rated: Mapping[float, Mapping[str, float]], labels: Mapping[str, str]) -> list[Figure]:
    """Goodput of each system at each rate; that of a beside the best of one-process systems, and beside vLLM alone."""
    figures = []
    for rate, found in rated.items():
        title = f"Poisson goal {rate:g}/s: goodput"
        figures += [
            Figure(f"{title}, {labels[name]}", value, "requests/s") for name, value in found.items() if name != "a"
        ]
        if "a" in found:
            best = max((found[name] for name in ("b", "c", "c256") if name in found), default=None)
            vllm = max((found[name] for name in ("c", "c256") if name in found), default=None)
            mine = f"{title}, {labels['a']}"
            figures.append(Figure(f"{mine}, against the best of b and c", found["a"], "requests/s", best or None, 1.0,
                                  relative=True))  # fmt: skip
            figures.append(Figure(f"{mine}, against vLLM alone", found["a"], "requests/s", vllm or None))
    return figures
