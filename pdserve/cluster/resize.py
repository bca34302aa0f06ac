"""Asks for sizes of the pools, and waits until they are so. For a process that is connected to Ray; blocks."""

from __future__ import annotations

import threading
import time

from pdserve.cluster.installed import applications_of, count, generations
from pdserve.cluster.notes import Notes
from pdserve.errors import ConfigError, DeadlineExceeded, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.scaling.plan import ROLES, Plan, Sizes

POLL_S = 0.2
_PLAN_S = 10.0  # the policy writes its plan within a second of the pools' start


def only_generation() -> str:
    """The pools that serve. Raises Unavailable when there are none, ConfigError while an update goes on."""
    found = generations()
    if not found:
        raise Unavailable(
            "no pools run on this Ray", reason="NOT_UP", remedy="start them with `pdserve up` or `serve deploy`"
        )
    if len(found) > 1:
        raise ConfigError(
            "an update is under way, or was broken off",
            reason="TWO_GENERATIONS",
            field="generation",
            remedy=f"wait for it, or delete the Serve applications of {found[0] or 'the first'} or {found[-1]}",
        )
    return found[0]


def ask_sizes(prefill: int | None, decode: int | None, timeout_s: float) -> Sizes:
    """Returns the sizes once they are reached; None keeps one.

    Raises:
        ConfigError: sizes that the plan does not allow; nothing was changed.
        DeadlineExceeded: they are still asked for, but not there yet.
    """
    generation = only_generation()
    notes, plan = Notes(generation), _plan(generation)
    now = notes.asked() or {role: counts.running for role, counts in count(applications_of(generation)).items()}
    sizes = {
        PREFILL: now[PREFILL] if prefill is None else prefill,
        DECODE: now[DECODE] if decode is None else decode,
    }
    plan.check_goal(sizes)
    notes.ask(sizes)
    until_sized(generation, sizes, timeout_s)
    return sizes


def ask_auto() -> None:
    """Sizes are the policy's again."""
    Notes(only_generation()).ask(None)


def until_sized(generation: str, sizes: Sizes, timeout_s: float) -> None:
    """Until exactly so many workers run and none starts or drains. Raises DeadlineExceeded, Unavailable."""
    end, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        counts = count(applications_of(generation))
        for role in ROLES:
            if counts[role].failure:
                raise Unavailable(
                    f"the {role} pool does not start: {counts[role].failure.strip().splitlines()[-1]}",
                    reason="POOL_FAILED",
                    field=role,
                    remedy="correct what it says; the log of its replicas has more",
                )
        if all((c.running, c.starting, c.stopping) == (sizes[role], 0, 0) for role, c in counts.items()):
            return
        if time.monotonic() > end:
            state = ", ".join(f"{role}: {c.running} run, {c.stopping} drain" for role, c in counts.items())
            raise DeadlineExceeded(
                f"not there after {timeout_s:g} s: {state}",
                reason="STILL_SCALING",
                field="timeout_s",
                remedy="see `pdserve status`",
            )
        pause.wait(POLL_S)


def _plan(generation: str) -> Plan:
    end, pause = time.monotonic() + _PLAN_S, threading.Event()
    while (plan := Notes(generation).plan()) is None:
        if time.monotonic() > end:
            raise Unavailable("the pools' policy has not begun", reason="NO_PLAN", remedy="try again in a few seconds")
        pause.wait(POLL_S)
    return plan
