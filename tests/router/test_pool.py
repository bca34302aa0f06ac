"""The router's view of the pools, over real registries."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from pdserve.errors import Unavailable
from pdserve.registry.client import RpcRegistry
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DECODE, DRAINING, PREFILL, READY, STALLED, STARTING, Load
from pdserve.registry.service import add_registry
from pdserve.rpc.server import Server
from router.gate import Gate
from router.pool import Job, Pool, corrected
from tests.router.support import MODEL, member, record


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> MemoryRegistry:
    return MemoryRegistry(clock)


@pytest.fixture
def pool(registry: MemoryRegistry, clock: Clock) -> Pool:
    return Pool(registry, Gate(), refresh_s=60.0, clock=clock)


def ready(pool: Pool) -> list[str]:
    return [m.id for m in pool.ready(MODEL)]


async def test_only_ready_workers_are_in_rotation(registry: MemoryRegistry, pool: Pool) -> None:
    for state in (STARTING, READY, DRAINING, STALLED):
        await registry.register(record(state, PREFILL, state=state))
    await registry.register(record("other", PREFILL, model="another"))
    await pool.refresh()
    assert ready(pool) == [READY]
    assert [m.id for m in pool.members()] == [DRAINING, "other", READY, STALLED, STARTING]
    assert list(pool.models()) == ["another", MODEL]


async def test_a_worker_is_gone_when_its_lease_is_over(registry: MemoryRegistry, pool: Pool, clock: Clock) -> None:
    await registry.register(record("p", PREFILL, lease_s=5.0))
    await pool.refresh()
    clock.now += 4.9
    await pool.refresh()
    assert ready(pool) == ["p"]
    clock.now += 0.2
    await pool.refresh()
    assert ready(pool) == []


async def test_a_suspect_is_out_until_it_is_heard_of_again(registry: MemoryRegistry, pool: Pool, clock: Clock) -> None:
    p = record("p", PREFILL)
    await registry.register(p)
    await pool.refresh()
    clock.now += 1
    pool.suspect(pool.members()[0])
    assert ready(pool) == []
    await pool.refresh()
    assert ready(pool) == []  # the snapshot still has the record, but it was not renewed
    clock.now += 1
    await registry.heartbeat("p", p.incarnation, READY, Load())
    await pool.refresh()
    assert ready(pool) == ["p"]


async def test_a_new_incarnation_is_not_suspect(registry: MemoryRegistry, pool: Pool) -> None:
    await registry.register(record("p", PREFILL))
    await pool.refresh()
    pool.suspect(pool.members()[0])
    await registry.register(record("p", PREFILL, incarnation=b"second boot of p"))
    await pool.refresh()
    assert ready(pool) == ["p"]


def job(started: float, ended: float | None = None) -> Job:
    return Job(member("p", PREFILL), prompt_tokens=10, pages=2, started=started, ended=ended)


@pytest.mark.parametrize(
    ("jobs", "queued", "waiting", "held"),
    [
        ([], 100, 4, 20),
        ([job(51.0)], 110, 5, 22),  # begun since the report
        ([job(49.0)], 100, 4, 20),  # in the report already
        ([job(49.0, ended=51.0)], 90, 3, 18),  # in the report, ended since
        ([job(51.0, ended=52.0)], 100, 4, 20),  # came and went
        ([job(40.0, ended=60.0)] * 20, 0, 0, 0),  # never below zero
        ([*[job(40.0, ended=60.0)] * 20, job(51.0)], 10, 1, 2),  # and what is new still counts
    ],
)
def test_reported_load_is_corrected_by_own_work(jobs: list[Job], queued: int, waiting: int, held: int) -> None:
    load = corrected(Load(queued_tokens=100, waiting=4, pages_held=20), jobs, renewed_at=50.0, role=PREFILL)
    assert (load.queued_tokens, load.waiting, load.pages_held) == (queued, waiting, held)


def test_own_work_on_a_decode_worker_runs() -> None:
    stream = replace(job(51.0), prompt_tokens=0)
    load = corrected(Load(running=2, pages_held=8), [stream], renewed_at=50.0, role=DECODE)
    assert (load.running, load.waiting, load.pages_held) == (3, 0, 10)


@pytest.mark.parametrize(
    ("jobs", "queued"), [([job(51.0)], 60), ([job(49.0)], 50), ([job(49.0, ended=51.0)], 40), ([], 50)]
)
def test_a_prompt_that_a_decode_worker_computes_is_no_stream(jobs: list[Job], queued: int) -> None:
    load = corrected(Load(running=2, queued_prefill_tokens=50), jobs, renewed_at=50.0, role=DECODE)
    assert (load.running, load.queued_prefill_tokens) == (2, queued)


async def test_corrections_are_dropped_once_reported(registry: MemoryRegistry, pool: Pool, clock: Clock) -> None:
    p = record("p", PREFILL)
    await registry.register(p)
    await pool.refresh()
    clock.now += 1
    (worker,) = pool.members()
    work = pool.begin(worker, prompt_tokens=30, cache_tokens=40)
    assert (pool.load(worker).queued_tokens, pool.load(worker).pages_held) == (30, 3)
    clock.now += 1
    await registry.heartbeat("p", p.incarnation, READY, Load(queued_tokens=30))
    await pool.refresh()
    assert pool.load(pool.members()[0]).queued_tokens == 30
    clock.now += 1
    pool.end(work)
    assert pool.load(pool.members()[0]).queued_tokens == 0
    clock.now += 1
    await registry.heartbeat("p", p.incarnation, READY, Load())
    await pool.refresh()
    assert pool._jobs == {}


async def test_an_outage_keeps_the_last_pool_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryRegistry()
    server = Server()
    add_registry(server, store)
    remote = RpcRegistry(await server.start(), timeout_s=1.0)
    pool = Pool(remote, Gate(), refresh_s=60.0)
    try:
        await store.register(record("p", PREFILL, lease_s=30.0))
        await pool.start()
        await server.stop()
        with caplog.at_level(logging.WARNING, "router.pool"):
            await pool.refresh()
            await pool.refresh()
        assert ready(pool) == ["p"]
        assert "registry unreachable" in pool.warning
        assert len(caplog.records) == 1
    finally:
        await pool.stop()
        await remote.close()


class Flaky(MemoryRegistry):
    """A memory registry whose process is away for a while and comes back empty."""

    away = False

    async def snapshot(self):  # type: ignore[no-untyped-def]
        if self.away:
            raise Unavailable("away")
        return await super().snapshot()


async def test_a_suspect_is_given_work_again_when_nobody_can_be_heard_of(clock: Clock) -> None:
    registry = Flaky(clock)
    pool = Pool(registry, Gate(), refresh_s=60.0, clock=clock)
    for worker_id, role in (("p", PREFILL), ("d", DECODE)):
        await registry.register(record(worker_id, role, lease_s=5.0))
    await pool.refresh()
    registry.away = True
    await pool.refresh()
    pool.suspect(pool.members()[1])
    assert pool.verdict(MODEL).matches == ()
    clock.now += 5.1
    assert len(pool.verdict(MODEL).matches) == 1


async def test_a_registry_that_forgot_everything_gets_a_lease_to_learn(clock: Clock) -> None:
    registry = Flaky(clock)
    pool = Pool(registry, Gate(), refresh_s=60.0, clock=clock)
    await registry.register(record("p", PREFILL, lease_s=5.0))
    await pool.refresh()
    registry.away = True
    clock.now += 60
    await pool.refresh()
    pool.suspect(pool.members()[0])
    assert ready(pool) == []
    clock.now += 6  # nobody can be heard of: a suspect gets another chance after a lease
    assert ready(pool) == ["p"]
    registry.away = False
    await pool.refresh()
    assert pool.warning == ""
    assert [m.id for m in pool.members()] == ["p"]
    clock.now += 5.1
    await pool.refresh()
    assert pool.members() == ()


@pytest.mark.parametrize(("pause_s", "left"), [(5.2, []), (5.3, ["p"])])
async def test_workers_get_a_lease_to_be_heard_of_after_all_stood_still(
    registry: MemoryRegistry, clock: Clock, pause_s: float, left: list[str]
) -> None:
    """As when a process that serves its own registry is stopped for longer than a lease, and goes on."""
    pool = Pool(registry, Gate(), refresh_s=0.25, clock=clock)
    await registry.register(record("p", PREFILL, lease_s=5.0))
    await pool.refresh()
    clock.now += pause_s
    await pool.refresh()
    assert ready(pool) == left
    for _ in range(25):
        clock.now += 0.2
        await pool.refresh()
    assert ready(pool) == []


async def test_without_a_registry_a_pool_does_not_start() -> None:
    remote = RpcRegistry("127.0.0.1:1", timeout_s=0.5)
    pool = Pool(remote, Gate(), refresh_s=0.1)
    with pytest.raises(Unavailable):
        await pool.start()
    await pool.stop()
    await remote.close()


class Broken(MemoryRegistry):
    """Its snapshots fail in a way that nobody foresaw, as long as `broken` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.snapshots = asyncio.Semaphore(0)

    async def snapshot(self):  # type: ignore[no-untyped-def]
        self.snapshots.release()
        if self.broken:
            raise AttributeError("no attribute 'decode'")
        return await super().snapshot()

    async def more_snapshots(self) -> None:
        """Returns when two more have begun, so that one more was dealt with."""
        async with asyncio.timeout(5):
            while not self.snapshots.locked():
                await self.snapshots.acquire()
            for _ in range(2):
                await self.snapshots.acquire()


async def test_an_unforeseen_error_is_a_warning_with_its_traceback_and_not_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Broken()
    pool = Pool(registry, Gate(), refresh_s=0.001)
    await registry.register(record("p", PREFILL, lease_s=30.0))
    await pool.start()
    try:
        registry.broken = True
        with caplog.at_level(logging.WARNING, "router.pool"):
            await registry.more_snapshots()
            assert "no attribute 'decode'" in pool.warning
            assert ready(pool) == ["p"]
            await registry.more_snapshots()
        (entry,) = caplog.records  # once, however often it happens
        assert entry.exc_info is not None and entry.exc_info[0] is AttributeError
        registry.broken = False
        await registry.register(record("q", PREFILL, lease_s=30.0))
        await registry.more_snapshots()
        assert (ready(pool), pool.warning) == (["p", "q"], "")
    finally:
        await pool.stop()


async def test_a_verdict_is_reached_once_for_each_state_of_the_pool(
    registry: MemoryRegistry, pool: Pool, clock: Clock
) -> None:
    p = record("p", PREFILL)
    await registry.register(p)
    await registry.register(record("d", DECODE))
    await pool.refresh()
    first = pool.verdict(MODEL)
    assert len(first.matches) == 1 and pool.verdict(MODEL) is first
    clock.now += 1
    pool.suspect(pool.members()[1])
    assert pool.verdict(MODEL).matches == ()
    clock.now += 1
    await registry.heartbeat("p", p.incarnation, READY, Load())
    await pool.refresh()
    assert len(pool.verdict(MODEL).matches) == 1
    await registry.deregister("d", record("d", DECODE).incarnation)
    await pool.refresh()
    assert pool.verdict(MODEL).matches == ()


async def test_the_background_task_refreshes_and_ends(registry: MemoryRegistry) -> None:
    class Counting(MemoryRegistry):
        def __init__(self) -> None:
            super().__init__()
            self.seen = asyncio.Event()
            self.snapshots = 0

        async def snapshot(self):  # type: ignore[no-untyped-def]
            self.snapshots += 1
            if self.snapshots == 3:
                self.seen.set()
            return await super().snapshot()

    counting = Counting()
    pool = Pool(counting, Gate(), refresh_s=0.001)
    await pool.start()
    await asyncio.wait_for(counting.seen.wait(), 5)
    await pool.stop()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "pool-refresh"] == []
