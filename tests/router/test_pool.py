"""The router's view of the pools, over real registries."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DECODE, DRAINING, PREFILL, READY, STALLED, STARTING, Load
from router.gate import Gate
from router.jobs import Job, corrected
from router.pool import Pool
from tests.clock import Clock
from tests.router.support import MODEL, member, ready, record


@pytest.fixture
def registry(clock: Clock) -> MemoryRegistry:
    return MemoryRegistry(clock)


@pytest.fixture
def pool(registry: MemoryRegistry, clock: Clock) -> Pool:
    return Pool(registry, Gate(), refresh_s=60.0, clock=clock)


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
    async with asyncio.timeout(5):
        await counting.seen.wait()
    await pool.stop()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "pool-refresh"] == []
