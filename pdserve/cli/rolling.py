"""A new version of the workers takes the place of the old one, and requests are served all the while.

    old (P, D) -> new (1, 1) beside it -> pool by pool one old worker drains, one new one starts -> old ends

A pair never mixes versions, since the gate compares contracts; so both pools change in step, and each
version has a pair for as long as it serves. What fails before the old pools begin to shrink leaves
everything as it was.
"""

from __future__ import annotations

import re
import threading
import time

from pdserve.cli.ray_pools import RayPools, Say, stop_pools
from pdserve.client import Client
from pdserve.cluster.installed import applications_of, count
from pdserve.cluster.names import application_name, worker_id
from pdserve.cluster.notes import Notes
from pdserve.cluster.resize import only_generation, until_sized
from pdserve.config import Config
from pdserve.errors import PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.scaling.plan import ROLES, Sizes

_POLL_S = 0.2
_ONE = {PREFILL: 1, DECODE: 1}


class Rolling:
    """One update; `run` once. Blocks."""

    def __init__(self, config: Config, gateway: str, api_key: str, say: Say) -> None:
        self._config = config
        self._gateway = gateway
        self._api_key = api_key
        self._say = say

    def run(self) -> None:
        """Raises ConfigError or Unavailable when the new version does not start: then the old one serves on."""
        old = only_generation()
        new = _next(old)
        pools = RayPools(self._config, new)
        goal = {PREFILL: self._config.pools.prefill, DECODE: self._config.pools.decode}
        now = {role: counts.running for role, counts in count(applications_of(old)).items()}
        Notes(new).ask(_ONE)
        try:
            self._say("starting the first workers of the new version")
            pools.start(initial=1)
            self._wait_for_pair(new, pools)
        except (PdserveError, KeyboardInterrupt):
            self._say("the old version serves on")
            stop_pools((new,), self._say)
            raise
        self._move(old, new, now, goal)
        self._say("the last workers of the old version drain")
        stop_pools((old,), self._say)
        self._size(new, goal)
        Notes(new).ask(None)

    def _move(self, old: str, new: str, now: Sizes, goal: Sizes) -> None:
        """Until both versions are as large as they may be beside the last pair of the other."""
        ours = dict(_ONE)
        while any(now[role] > 1 for role in ROLES):
            now = {role: max(1, now[role] - 1) for role in ROLES}
            self._size(old, now)
            ours = {role: min(goal[role], ours[role] + 1) for role in ROLES}
            self._size(new, ours)
            self._say(f"new: {ours[PREFILL]}+{ours[DECODE]}, old: {now[PREFILL]}+{now[DECODE]}")

    def _size(self, generation: str, sizes: Sizes) -> None:
        Notes(generation).ask(sizes)
        # A worker may drain, and another one load its model.
        drain_s = max(self._config.prefill.grace_s, self._config.decode.grace_s)
        until_sized(generation, sizes, drain_s + self._config.pools.ready_timeout_s)

    def _wait_for_pair(self, generation: str, pools: RayPools) -> None:
        """Until the router knows a pair of the new version that fits."""
        prefill, decode = (worker_id(application_name(role, generation), "") for role in ROLES)
        end, pause = time.monotonic() + self._config.pools.ready_timeout_s, threading.Event()
        with Client(self._gateway, self._config.router.rpc, api_key=self._api_key) as client:
            while True:
                found = client.status()
                ready = {worker.worker_id for worker in found.workers if worker.state == "ready"}
                fits = (
                    pair.fits and {pair.prefill_worker, pair.decode_worker} <= ready
                    for pair in found.pairs
                    if pair.prefill_worker.startswith(prefill) and pair.decode_worker.startswith(decode)
                )
                if any(fits):
                    return
                pools.check()
                if time.monotonic() > end:
                    raise Unavailable(
                        "the new version has no pair of workers in time",
                        reason="NOT_READY",
                        field="pools.ready_timeout_s",
                        remedy="make room for one more worker of each pool, or raise it",
                    )
                pause.wait(_POLL_S)


def _next(generation: str) -> str:
    """ "" -> v2 -> v3 ..."""
    number = re.fullmatch(r"v(\d+)", generation)
    return f"v{int(number[1]) + 1 if number else 2}"
