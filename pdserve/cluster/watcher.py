"""Watches both pools of one generation, inside Serve's controller, and decides their sizes.

    Serve --target(): which replicas run--> [watcher] --target: how many there should be--> Serve
    thread, every PERIOD_S: sizes asked for, replica states, worker records -> decide() -> targets

The thread is there because all of that waits for others, and the controller's event loop must not.
It starts with the first call and ends when Serve has stopped calling. Without a registry nothing is
known of pressure: then only what an operator asks for is done.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from types import MappingProxyType

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from pdserve.cluster.found_registry import FoundRegistry
from pdserve.cluster.installed import Counts, count
from pdserve.cluster.names import worker_id
from pdserve.cluster.notes import Announced, Notes
from pdserve.errors import PdserveError
from pdserve.registry.open import open_registry
from pdserve.registry.records import READY, Load, Registry
from pdserve.scaling.load import pressure
from pdserve.scaling.plan import ROLES, Plan
from pdserve.scaling.policy import Memory, Seen, decide

log = logging.getLogger(__name__)

PERIOD_S = 0.5
_AGAIN_S = 5.0  # after a fault of ours
_IDLE_S = 30.0  # without a call: the generation is gone

_watchers: dict[str, Watcher] = {}  # by generation; of this process


@dataclass(frozen=True)
class Told:
    """What Serve said of one pool at its last call."""

    application: str
    replicas: tuple[str, ...]  # unique ids of those that run
    target: int


def watcher_of(generation: str, plan: Plan) -> Watcher:
    """The one that both pools share; a new plan replaces the old one. Called on the controller's loop."""
    found = _watchers.get(generation)
    if found is None:
        found = _watchers[generation] = Watcher(generation)
    found.plan = plan
    return found


class Watcher:
    """See the module's docstring. `target` is called by the controller's loop, the rest by the thread."""

    plan: Plan

    def __init__(self, generation: str) -> None:
        self._generation = generation
        self._notes = Notes(generation)
        self._told: dict[str, Told] = {}
        self._memories: MappingProxyType[str, Memory] = MappingProxyType({})  # replaced as a whole
        self._called_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def target(self, role: str, application: str, replicas: tuple[str, ...], target: int) -> int:
        """Replicas that a pool should have. Notes what Serve says of it. Does not wait."""
        self._called_at = time.monotonic()
        self._told[role] = Told(application, replicas, target)
        if self._thread is None or not self._thread.is_alive():
            self._memories = MappingProxyType({})  # sizes are Serve's until the next look
            self._thread = threading.Thread(target=self._run, name=f"pdserve-scaling-{self._generation}", daemon=True)
            self._thread.start()
        memory = self._memories.get(role)
        return target if memory is None else memory.target

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception:  # the next call of Serve starts another thread
            log.exception("the autoscaling policy of %r failed", self._generation)
            threading.Event().wait(_AGAIN_S)

    async def _watch(self) -> None:
        registry: Registry | None = None
        reached: Announced | None = None
        published: Plan | None = None
        try:
            while time.monotonic() - self._called_at < _IDLE_S:
                if self.plan != published:
                    published = self.plan
                    self._notes.publish(published)
                if reached != (announced := self._notes.announced()):
                    if registry is not None:
                        await registry.close()
                    reached, registry = announced, _open(announced)
                await self._look(registry)
                await asyncio.sleep(PERIOD_S)
        finally:
            if registry is not None:
                await registry.close()

    async def _look(self, registry: Registry | None) -> None:
        """One decision, from everything that can be known now."""
        told = dict(self._told)
        if set(told) != set(ROLES):
            return
        try:
            counts = count({role: pool.application for role, pool in told.items()})
        except (RayError, RayServeException) as error:
            log.warning("Serve does not tell its replicas' states: %s", error)
            return
        loads = await _loads(registry)
        seen = {role: _seen(role, told[role], counts[role], loads, self.plan) for role in ROLES}
        now = time.monotonic()
        memories = {role: self._memories.get(role) or Memory(told[role].target, seen_at=now) for role in ROLES}
        decided = decide(now, seen, memories, self.plan, self._notes.asked())
        for role in ROLES:
            if decided[role].target != memories[role].target:
                log.warning("%s: %s -> %d workers", role, seen[role], decided[role].target)
        self._memories = MappingProxyType(decided)


def _open(announced: Announced | None) -> Registry | None:
    if announced is None:
        return None
    if announced.url == "memory://":
        return FoundRegistry(announced.registry, announced.rpc)
    return open_registry(announced.url, announced.registry, announced.rpc)


async def _loads(registry: Registry | None) -> dict[str, Load]:
    """What the ready workers report, by worker id; nothing without a registry."""
    if registry is None:
        return {}
    try:
        records = await registry.snapshot()
    except PdserveError as error:
        log.warning("the registry cannot be read, pools keep their sizes: %s", error)
        return {}
    return {live.record.worker_id: live.record.load for live in records if live.record.state == READY}


def _seen(role: str, told: Told, counts: Counts, loads: dict[str, Load], plan: Plan) -> Seen:
    own = [worker_id(told.application, replica) for replica in told.replicas]
    reports = [loads[name] for name in own if name in loads]
    return Seen(counts.running, counts.starting, counts.stopping, pressure(role, reports, plan.settings))
