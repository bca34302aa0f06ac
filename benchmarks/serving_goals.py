"""What `benchmarks.serving` wants of system a, and of whom it wants it."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.report import Figure
from benchmarks.workloads import Phase, spread

DISAGGREGATED = "d"
P99_OVER_IDLE = 1.3
LONG_TTFT = 0.6
STEADY_TTFT = 0.2
TOKENS = 1.1


def interference_goals(found: Mapping[str, tuple[Phase, ...]]) -> list[Figure]:
    """Goals of a; those for a ratio to a system that did not run stay without a verdict."""
    if "a" not in found:
        return []
    idle, busy = found["a"]
    mine = numbers(busy)
    alone = spread(idle.gaps("steady"))
    theirs = numbers(found[DISAGGREGATED][-1]) if DISAGGREGATED in found else {}
    peers = [phases[-1].tokens_per_s for name, phases in found.items() if name not in ("a", "b")]
    figures = [
        Figure(f"interference goal: {title}, against vLLM P/D", mine[key], unit, theirs.get(key), goal, True, True)
        for key, title, unit, goal in (
            ("p99", "inter-token p99", "ms", 1.0),
            ("max", "inter-token maximum", "ms", 1.0),
            ("long", "TTFT p50 of long prompts", "s", LONG_TTFT),
            ("steady", "TTFT p50 of steady streams", "s", STEADY_TTFT),
        )
        if key in mine
    ]
    if alone and "p99" in mine:
        title = "interference goal: inter-token p99, against the same before the long prompts"
        figures.append(Figure(title, mine["p99"], "ms", 1000 * alone["p99"], P99_OVER_IDLE, at_most=True))
    title = "interference goal: tokens per second, against the best peer"
    best = max(peers) if peers else None
    figures.append(Figure(title, busy.tokens_per_s, "tokens/s", best, TOKENS, relative=True))
    return figures


def numbers(phase: Phase) -> dict[str, float]:
    """Milliseconds between tokens (p99, max) and median seconds to the first one (long, steady)."""
    made = {name: 1000 * value for name, value in spread(phase.gaps("steady")).items()}
    for kind in ("long", "steady"):
        first = spread(phase.first_tokens(kind))
        if first:
            made[kind] = first["p50"]
    return made


def poisson_goals(rated: Mapping[float, Mapping[str, float]], labels: Mapping[str, str]) -> list[Figure]:
    """Goodput of each system at each rate; that of a beside the best of one-process systems."""
    figures = []
    for rate, found in rated.items():
        title = f"Poisson {rate:g}/s: goodput"
        figures += [
            Figure(f"{title}, {labels[name]}", value, "requests/s") for name, value in found.items() if name != "a"
        ]
        if "a" in found:
            others = [found[name] for name in ("b", "c", "c256") if name in found]
            best = max(others) if others else None
            figures.append(Figure(f"{title}, {labels['a']}, against the best of b and c", found["a"], "requests/s",
                                  best or None, 1.0, relative=True))  # fmt: skip
    return figures
