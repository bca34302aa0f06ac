"""What the doctor says: findings, and how bad they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, FAILURE = LEVELS = ("ok", "warning", "failure")  # in this order: their places are the exit codes


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str  # stable: version | contract | worker | path | certificate | clock | registry | load | accounts | ...
    subject: str  # a worker id, "router", "p0 -> d0"; empty: the deployment
    level: str  # OK | WARNING | FAILURE
    message: str  # one sentence: what is so
    remedy: str = ""  # one sentence: what to do; empty only if nothing is wrong


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all is well; 1: there are warnings; 2: there are failures."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)


def ok(check: str, message: str, subject: str = "") -> Finding:
    return Finding(check, subject, OK, message)


def warning(check: str, subject: str, message: str, remedy: str) -> Finding:
    return Finding(check, subject, WARNING, message, remedy)


def failure(check: str, subject: str, message: str, remedy: str) -> Finding:
    return Finding(check, subject, FAILURE, message, remedy)


def unless_any(found: list[Finding], well: Finding) -> list[Finding]:
    """What was found, or that all is well."""
    return found or [well]
