"""One workload on one system: what came, kept in a folder so that a long measurement can be made in parts.

A part is a JSON file that only `benchmarks.serving` writes. `kept` takes those of this machine, this version of the
code's workloads and the last MAX_AGE_S seconds, and says which it leaves out: no old figure can pass as a new one.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.completions import Ask, Outcome
from benchmarks.workloads import Phase

MAX_AGE_S = 8 * 3600
FORMAT = 1
_PREDICTED = ("predicted_handoff_ms", "predicted_decode_ms", "predicted_split_ms")
_RECORD = ("placement", "placement_reason", "first_token_ms", "handoff_tokens", *_PREDICTED)


@dataclass(frozen=True)
class Run:
    """Poisson runs have a rate and one phase; interference has none, and two phases: before and during."""

    workload: str
    system: str
    seed: int
    phases: tuple[Phase, ...]
    rate: float = 0.0
    cores: Mapping[str, float] = field(default_factory=dict)  # processor time per second of each process
    settings: str = ""  # what the system was given besides the defaults

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.system}" + (f"-{self.rate:g}" if self.rate else "") + f"-seed{self.seed}"


def keep(folder: Path, run: Run) -> None:
    """Writes the run, in place of an earlier one of the same workload, system, rate and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {outcome.ask.kind + str(id(outcome)): outcome for phase in run.phases for outcome in phase.outcomes}
    numbers = {id(outcome): number for number, outcome in enumerate(whole.values())}
    content = {
        "format": FORMAT,
        "machine": platform.node() + " " + platform.machine(),
        "made": time.time(),
        "workload": run.workload,
        "system": run.system,
        "seed": run.seed,
        "rate": run.rate,
        "cores": dict(run.cores),
        "settings": run.settings,
        "outcomes": [_outcome_to_json(outcome) for outcome in whole.values()],
        "phases": [
            {"begin": phase.begin, "end": phase.end, "outcomes": [numbers[id(outcome)] for outcome in phase.outcomes]}
            for phase in run.phases
        ],
    }
    (folder / f"{run.name}.json").write_text(json.dumps(content))


def kept(folder: Path) -> list[Run]:
    """By name. What is not of here and now is left out, with a word on stderr."""
    runs = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        age_s = time.time() - content["made"]
        here = content["machine"] == platform.node() + " " + platform.machine()
        if content["format"] != FORMAT or not here or age_s > MAX_AGE_S:
            print(f"{file}: left out: of another machine or version, or {age_s / 3600:.0f} hours old", file=sys.stderr)
            continue
        outcomes = [_outcome(each) for each in content["outcomes"]]
        phases = tuple(
            Phase(tuple(outcomes[number] for number in each["outcomes"]), each["begin"], each["end"])
            for each in content["phases"]
        )
        named = {name: content[name] for name in ("workload", "system", "seed", "rate", "cores", "settings")}
        runs.append(Run(phases=phases, **named))
    return runs


def _outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Prompts by their length only."""
    return {
        **asdict(outcome),
        "ask": [outcome.ask.kind, len(outcome.ask.prompt), outcome.ask.max_tokens],
        "record": {name: outcome.record[name] for name in _RECORD if name in outcome.record},
    }


def _outcome(content: Mapping[str, Any]) -> Outcome:
    kind, length, max_tokens = content["ask"]
    return Outcome(
        ask=Ask(kind, (0,) * length, max_tokens),
        sent=content["sent"],
        arrivals=[(at, count) for at, count in content["arrivals"]],
        error=content["error"],
        record=content["record"],
    )
