"""What a case is, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pdserve.conformance.bench import Bench


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    run: Callable[[Bench], None]
    hostile: bool = False


@dataclass(frozen=True)
class Result:
    name: str
    group: str
    outcome: Outcome
    detail: str  # why it failed or was skipped
    hostile_inputs: int
    seconds: float
