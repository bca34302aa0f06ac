"""Who is in the pools, as this router knows it: the registry's last snapshot, corrected locally.

Producer: one background task that takes a snapshot every `refresh_s`. Consumers: requests
and status, on the same event loop; they only read, so no request waits for the registry.
Bound: one snapshot; corrections are at most one per request in flight or ended since the
worker's last report.

    member  -- a call to it fails at the transport -->  suspect (not in `ready`)
    suspect -- heartbeat after the failure, or a new incarnation -->  member
    member  -- lease over, or deregistered: absent from the snapshot -->  gone

While the registry cannot be reached, or a refresh fails in any other way, the last known pool
stays in use, `warning` says so, and the task goes on. For one lease after it is back, workers it
has forgotten stay too: a registry that lost its memory learns of them with their next heartbeat.
So it is after a snapshot that is late by a lease: the registry or this process stood still, and
with them, maybe, all heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from pdserve.errors import PdserveError
from pdserve.registry.records import READY, LiveRecord, Load, Registry
from pdserve.rpc.background import in_turns, set_within
from router.gate import Gate, Member, Verdict, group_key
from router.jobs import Job, corrected

log = logging.getLogger(__name__)


class Pool:
    """See the module's docstring. Belongs to one event loop.

    Args:
        on_addresses: told after every snapshot which addresses the members have now.
    """

    def __init__(
        self,
        registry: Registry,
        gate: Gate,
        refresh_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_addresses: Callable[[Collection[str]], Awaitable[None]] | None = None,
    ) -> None:
        self.warning = ""  # set while snapshots fail
        self.gate = gate
        self._registry = registry
        self._refresh_s = refresh_s
        self._clock = clock
        self._on_addresses = on_addresses
        self._members: dict[str, Member] = {}  # by worker id
        self._verdicts: dict[str, Verdict] = {}  # by model; of the pool as it is now
        self._ready: dict[str, tuple[Member, ...]] = {}  # the same
        self._models: dict[str, int] = {}
        self._renewals: dict[bytes, float] = {}  # incarnation -> last renewal
        self._suspects: dict[bytes, float] = {}  # incarnation -> when a call to it failed
        self._jobs: dict[bytes, list[Job]] = {}  # by incarnation
        self._first_seen: dict[str, int] = {}  # model -> Unix seconds
        self._refreshed_at = clock()
        self._asked_at = float("-inf")  # when the snapshot that is in use was asked for
        self._grace_until = 0.0
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Takes the first snapshot and keeps taking them. Raises Unavailable without a registry."""
        await self._apply(self._clock(), await self._registry.snapshot())
        self._task = asyncio.create_task(self._refresh_forever(), name="pool-refresh")

    async def stop(self) -> None:
        """Ends the background task. Idempotent; surfaces an error that ended the task early."""
        self._stopping.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    async def refresh(self) -> None:
        """Takes one snapshot now; an unreachable registry becomes `warning`."""
        asked_at = self._clock()  # before the call, so that renewals look older than they are, never newer
        try:
            records = await self._registry.snapshot()
        except PdserveError as error:
            if not self.warning:
                log.warning("registry unreachable, serving from the last known pool: %s", error)
            self.warning = f"registry unreachable, serving from the last known pool: {error}"
            return
        leases = [member.record.lease_s for member in self._members.values()]
        now, due_at = self._clock(), self._refreshed_at + self._refresh_s
        self._refreshed_at = now
        if leases and (self.warning or now > due_at + min(leases)):
            self._grace_until = now + max(leases)
        await self._apply(asked_at, records)
        if self._on_addresses is not None:
            await self._on_addresses({member.address for member in self._members.values()})
        if self.warning:
            log.warning("snapshots of the registry work again")
            self.warning = ""

    def members(self) -> tuple[Member, ...]:
        """Everyone known, in whatever state, by worker id."""
        return tuple(self._members.values())

    @property
    def snapshot_age_s(self) -> float:
        """Seconds since the registry was last heard."""
        return self._clock() - self._refreshed_at

    def models(self) -> dict[str, int]:
        """Served model names and when this router first saw them, in Unix seconds."""
        return dict(self._models)

    def ready(self, model: str) -> tuple[Member, ...]:
        """Workers of a model that may be given work now."""
        if self._time_may_clear:
            return self._ready_now(model)
        if model not in self._ready:
            self._ready[model] = self._ready_now(model)
        return self._ready[model]

    def is_ready(self, member: Member) -> bool:
        return member.record.state == READY and not self.is_suspect(member)

    def verdict(self, model: str) -> Verdict:
        """The gate's word on the ready workers of a model; asked once for each state of the pool."""
        if self._time_may_clear:
            return self.gate.judge(self.ready(model))
        if model not in self._verdicts:
            self._verdicts[model] = self.gate.judge(self.ready(model))
        return self._verdicts[model]

    @property
    def can_serve(self) -> bool:
        """Whether any model has a pair of ready workers that fits."""
        return any(self.verdict(name).matches for name in self.models())

    def suspect(self, member: Member) -> None:
        """Takes a worker out until it is heard of again: a call to it failed at the transport."""
        log.warning("worker %s at %s does not answer, out of rotation", member.id, member.address)
        self._suspects[member.record.incarnation] = self._clock()
        self._forget()

    def begin(self, member: Member, prompt_tokens: int, cache_tokens: int, streams: int = 1, tenant: str = "") -> Job:
        """Notes work given to a worker before its next report does. The caller must `end` it.

        Args:
            prompt_tokens: to compute; 0 for the streams of a decode worker.
            cache_tokens: to hold pages for.
        """
        pages = -(-cache_tokens // member.record.contract.page_size)
        job = Job(member, prompt_tokens, pages, self._clock(), streams=streams, tenant=tenant)
        self._jobs.setdefault(member.record.incarnation, []).append(job)
        return job

    def end(self, job: Job) -> None:
        """Idempotent."""
        if job.ended is None:
            job.ended = self._clock()
        self._drop_settled(job.member.record.incarnation)

    def load(self, member: Member) -> Load:
        """What the worker last reported, corrected by our own work since."""
        jobs = self._jobs.get(member.record.incarnation, ())
        return corrected(member.record.load, jobs, self._renewed_at(member.record.incarnation), member.record.role)

    def prompts(self, member: Member) -> tuple[int, ...]:
        """Tokens of each prompt that this router has given the worker and that is not known to be computed."""
        jobs = self._jobs.get(member.record.incarnation, ())
        return tuple(job.prompt_tokens for job in jobs if job.prompt_tokens and job.ended is None)

    def parts(self, member: Member, size: Callable[[Job], int]) -> dict[str, float]:
        """By tenant, its part of what this router has given the worker and that has not ended; of 1 together."""
        sizes: Counter[str] = Counter()
        for job in self._jobs.get(member.record.incarnation, ()):
            if job.ended is None and size(job):
                sizes[job.tenant] += size(job)
        whole = sizes.total()
        return {tenant: mine / whole for tenant, mine in sizes.items()}

    def steps(self, member: Member) -> int | None:
        """Engine steps since boot, as the worker last reported them; None for one that is gone."""
        now = self._members.get(member.id)
        same = now is not None and now.record.incarnation == member.record.incarnation
        return now.record.load.steps if now is not None and same else None

    async def _refresh_forever(self) -> None:
        while not await set_within(self._stopping, self._refresh_s):
            try:
                await self.refresh()
            except Exception as error:
                # A fault of ours or of a record we did not foresee: the next snapshot may be good,
                # and a router that stops looking would serve from a pool of the past without a word.
                text = f"a refresh of the pool failed, serving from the last known pool: {error!r}"
                if text != self.warning:
                    log.exception("a refresh of the pool failed, serving from the last known pool")
                self.warning = text

    async def _apply(self, asked_at: float, records: tuple[LiveRecord, ...]) -> None:
        """In turns until all members are made, and then at once: no request sees half a snapshot."""
        fresh = [self._member(live, asked_at) async for live in in_turns(records)]
        if asked_at < self._asked_at:  # a later one was quicker
            return
        self._asked_at = asked_at
        members = {member.id: member for member in fresh}
        if asked_at < self._grace_until:
            members = self._members | members
        self._members = dict(sorted(members.items()))
        self._forget()
        for member in fresh:
            self._first_seen.setdefault(member.record.model, int(time.time()))
        models = sorted({member.record.model for member in self._members.values()})
        self._models = {name: self._first_seen[name] for name in models}
        self._renewals = {m.record.incarnation: m.renewed_at for m in self._members.values()}
        self._suspects = {i: at for i, at in self._suspects.items() if i in self._renewals and self._renewals[i] <= at}
        for incarnation in tuple(self._jobs):
            self._drop_settled(incarnation)

    def _ready_now(self, model: str) -> tuple[Member, ...]:
        return tuple(m for m in self._members.values() if m.record.model == model and self.is_ready(m))

    @property
    def _time_may_clear(self) -> bool:
        """A suspect, while nobody can be heard of."""
        return bool(self.warning and self._suspects)

    def _forget(self) -> None:
        """What was worked out from the pool as it was."""
        self._verdicts.clear()
        self._ready.clear()

    def _member(self, live: LiveRecord, asked_at: float) -> Member:
        record = live.record
        old = self._members.get(record.worker_id)
        # A contract is fixed for a worker's life, so its digest is computed once.
        if old is not None and old.record.incarnation == record.incarnation:
            group, digest = old.group, old.contract_digest
        else:
            digest = record.contract.digest()
            group = group_key(record.contract, digest)
        expires_at = asked_at + live.lease_left_s
        return Member(record, group, digest, renewed_at=expires_at - record.lease_s, expires_at=expires_at)

    def _renewed_at(self, incarnation: bytes) -> float:
        """When the worker last renewed; infinity for one that is gone, so that nothing waits for its report."""
        return self._renewals.get(incarnation, float("inf"))

    def is_suspect(self, member: Member) -> bool:
        """Out of rotation: a call to it failed, and it was not heard of since."""
        failed_at = self._suspects.get(member.record.incarnation)
        if failed_at is None:
            return False
        if self.warning:  # nobody can be heard of now: try again after a lease
            return self._clock() < failed_at + member.record.lease_s
        return True

    def _drop_settled(self, incarnation: bytes) -> None:
        """Forgets jobs that no longer correct anything: both ends lie on one side of the last report."""
        renewed_at = self._renewed_at(incarnation)
        jobs = self._jobs.get(incarnation, [])
        open_jobs = [j for j in jobs if j.ended is None or j.started < renewed_at <= j.ended]
        if open_jobs:
            self._jobs[incarnation] = open_jobs
        else:
            self._jobs.pop(incarnation, None)
