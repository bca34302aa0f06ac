"""A registry in this process: what an embedded router uses, and the reference for the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pdserve.errors import Exhausted, NotFound, Refused
from pdserve.registry.records import LiveRecord, Load, WorkerRecord

MAX_WORKERS = 4096


class MemoryRegistry:
    """Records with lease ends on a monotonic clock. One event loop; no method waits, none can be unavailable.

    Ended leases are dropped whenever the table is read or a record is added, so it holds at most
    `MAX_WORKERS` records without needing a timer; a heartbeat, of which there are many, looks at its own record only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds and never goes back."""
        self._clock = clock
        self._records: dict[str, tuple[WorkerRecord, float]] = {}  # worker id -> record, lease end

    async def register(self, record: WorkerRecord, again: bool = False) -> None:
        """See Registry. Raises Exhausted when the table is full."""
        self._drop_ended()
        known, _ = self._records.get(record.worker_id, (None, 0.0))
        if again and known is not None and known.incarnation != record.incarnation:
            raise id_taken(record.worker_id)
        if record.worker_id not in self._records and len(self._records) >= MAX_WORKERS:
            raise Exhausted(
                f"the registry holds {MAX_WORKERS} workers already",
                reason="REGISTRY_FULL",
                remedy="use one registry per installation",
            )
        self._records[record.worker_id] = (record, self._clock() + record.lease_s)

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        record = self._owned(worker_id, incarnation)
        if record is None:
            raise not_registered(worker_id)
        self._records[worker_id] = (replace(record, state=state, load=load), self._clock() + record.lease_s)

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        if self._owned(worker_id, incarnation) is not None:
            del self._records[worker_id]

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        self._drop_ended()
        now = self._clock()
        return tuple(LiveRecord(record, end - now) for _, (record, end) in sorted(self._records.items()))

    async def close(self) -> None:
        self._records.clear()

    def _owned(self, worker_id: str, incarnation: bytes) -> WorkerRecord | None:
        record, end = self._records.get(worker_id, (None, 0.0))
        alive = record is not None and record.incarnation == incarnation and end > self._clock()
        return record if alive else None

    def _drop_ended(self) -> None:
        now = self._clock()
        self._records = {key: value for key, value in self._records.items() if value[1] > now}


def not_registered(worker_id: str) -> NotFound:
    return NotFound(
        f"worker {worker_id!r} is not registered with this incarnation",
        reason="NOT_REGISTERED",
        field="worker_id",
        remedy="register again",
    )


def id_taken(worker_id: str) -> Refused:
    return Refused(
        f"another worker has registered as {worker_id!r} since",
        reason="WORKER_ID_TAKEN",
        field="worker_id",
        remedy="give each worker an id of its own, or none: then it gets a random one",
    )
