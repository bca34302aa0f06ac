"""Workers that stop, or that nobody can reach any more, with requests in every stage on them.

A request succeeds elsewhere, whether it had tokens or not, and its answer is the same; with nowhere
to go it ends in a typed error. These workers die inside this process; test_processes.py kills real
ones, and test_resume.py looks closely at answers that go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pdserve.client.events import Completion, Event, Tokens
from pdserve.errors import Unavailable
from pdserve.registry.records import LiveRecord, Load, Registry, WorkerRecord
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish
from tests.e2e.stack import MODEL, Stack, alone, stack, streaming
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.engine.tiny import prompt

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8)
ENDLESS = replace(GREEDY, max_tokens=400)
SHORT_LEASE = RegistrySettings(lease_s=1.0, heartbeat_s=0.1, timeout_s=1.0)
PROMPTS = [prompt(18 + 3 * n, seed=n) for n in range(3)]


class Line(Registry):
    """A worker's way to its registry, which a test can cut."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.cut = False

    async def register(self, record: WorkerRecord, again: bool = False) -> None:
        await self._end().register(record, again)

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        await self._end().heartbeat(worker_id, incarnation, state, load)

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        await self._end().deregister(worker_id, incarnation)

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        return await self._end().snapshot()

    async def close(self) -> None:
        pass

    def _end(self) -> Registry:
        if self.cut:
            raise Unavailable("the line is cut")
        return self._registry


def members(made: Stack) -> list[str]:
    return [member.id for member in made.router.pool.members()]


@asynccontextmanager
async def waiting(made: Stack, prefill: WatchedEngine) -> AsyncIterator[list[asyncio.Task[Completion]]]:
    """Three requests that wait on the only decode worker for caches that do not come, meanwhile."""
    worker = made.decodes[0]
    already = len(worker.pipeline.sequences)
    with prefill.held():
        tasks = [asyncio.create_task(made.ask(ids, GREEDY)) for ids in PROMPTS]
        async with asyncio.timeout(WAIT_S):
            await prefill.inside.wait()
        await made.until(lambda: len(worker.pipeline.sequences) == already + 3)
        yield tasks


async def check_moved(tasks: list[asyncio.Task[Completion]], lost: str, **now: str) -> None:
    """All came to the right answer, on the second attempt, on the workers named."""
    for task, ids in zip(tasks, PROMPTS, strict=True):
        async with asyncio.timeout(WAIT_S):
            answer = await task
        assert answer.ids == alone(ids, GREEDY).ids
        assert answer.record is not None and answer.record.attempts == 2
        assert {name: getattr(answer.record, name) for name in now} == now
        (note,) = answer.record.notes
        assert note.startswith("attempt 1 failed at") and lost in note


async def check_goes_on(events: AsyncIterator[Event]) -> None:
    """The rest of ENDLESS, of which one token had come, is what it should be."""
    rest = [event async for event in events]
    assert isinstance(rest[-1], Finish)
    tokens = [event for event in rest if isinstance(event, Tokens)]
    assert tokens[0].first_index == 1
    ids = tuple(token for event in tokens for token in event.ids)
    assert ids == alone(prompt(30), ENDLESS).ids[1:]


async def test_a_decode_worker_that_stops() -> None:
    prefill, doomed = engine(), engine()
    async with stack() as made:
        await made.add_prefill(prefill)
        await made.add_decode(doomed)
        with doomed.held():
            async with streaming(made, prompt(30), ENDLESS) as events, waiting(made, prefill) as tasks:
                await made.add_decode(worker_id="d1")
                stopping = asyncio.create_task(made.remove(made.decodes[0]))
                doomed.let_go()  # a worker stops between two steps
                async with asyncio.timeout(WAIT_S):
                    await stopping
                assert members(made) == ["d1", "p0"]
                prefill.let_go()
                await check_goes_on(events)
            await check_moved(tasks, "decode worker d0", decode_worker="d1")


async def test_a_prefill_worker_that_stops() -> None:
    doomed = engine()
    longer = replace(GREEDY, max_tokens=60)
    async with stack() as made:
        await made.add_prefill(doomed, max_running=1)  # one of three computes, two queue
        await made.add_decode()
        before = asyncio.create_task(made.ask(prompt(30), longer))
        await made.until(lambda: bool(made.decodes[0].pipeline.scheduler.running))
        async with waiting(made, doomed) as tasks:
            await made.add_prefill(worker_id="p1")
            stopping = asyncio.create_task(made.remove(made.prefills[0]))
            await made.until(lambda: "p0" not in members(made))
        async with asyncio.timeout(WAIT_S):
            await stopping
        await check_moved(tasks, "prefill worker p0", prefill_worker="p1", decode_worker="d0")
        # Whoever has its cache needs no prefill worker any more.
        assert (await before).ids == alone(prompt(30), longer).ids


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_only_worker_of_a_pool_stops(role: str) -> None:
    prefill = engine()
    async with stack() as made:
        await made.add_prefill(prefill)
        await made.add_decode()
        async with waiting(made, prefill) as tasks:
            stopping = asyncio.create_task(made.remove(made.prefills[0] if role == "prefill" else made.decodes[0]))
            await made.until(lambda: len(members(made)) == 1)
        async with asyncio.timeout(WAIT_S):
            await stopping
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, Unavailable) and error.reason == "DRAINING" and error.retryable
        with pytest.raises(Unavailable) as caught:
            await made.ask(PROMPTS[0], GREEDY)
        assert caught.value.reason == f"NO_{role.upper()}_WORKER"
        await (made.add_prefill if role == "prefill" else made.add_decode)(worker_id="new")
        assert (await made.ask(PROMPTS[0], GREEDY)).ids == alone(PROMPTS[0], GREEDY).ids


async def test_a_decode_worker_that_falls_off_the_network() -> None:
    """It neither says goodbye nor ends anything: its listeners close, and its heartbeats no longer come through."""
    prefill = engine()
    async with stack() as made:
        line = Line(made.router.registry)
        await made.add_prefill(prefill)
        lost = await made.add_decode(through=line, registry=SHORT_LEASE)
        async with streaming(made, prompt(30), ENDLESS) as events, waiting(made, prefill) as tasks:
            await made.add_decode(worker_id="d1")
            line.cut = True
            await lost._server.stop(0.0)
            await lost._transfer.stop(0.0)
            # Out of rotation at once, and forgotten within its lease; nothing is sent to it meanwhile.
            await made.until(lambda: "d0" not in [m.id for m in made.router.pool.ready(MODEL)], SHORT_LEASE.lease_s)
            prefill.let_go()
            await check_goes_on(events)
            await made.until(lambda: members(made) == ["d1", "p0"], SHORT_LEASE.lease_s + 1.0)
        await check_moved(tasks, "decode worker d0", decode_worker="d1")
        assert not lost.blocks.held_count and not lost.pipeline.sequences  # its side let go, too
        await made.remove(lost)


async def test_a_drained_worker_finishes_what_it_has() -> None:
    longer = replace(GREEDY, max_tokens=40)
    draining = engine()
    async with stack() as made:
        await made.add_prefill()
        old = await made.add_decode(draining)
        with draining.held():
            first = asyncio.create_task(made.ask(prompt(30), longer))
            async with asyncio.timeout(WAIT_S):
                await draining.inside.wait()
            await made.add_decode(worker_id="d1")
            ending = asyncio.create_task(old.drain(WAIT_S))
            await made.until(lambda: members(made) == ["d1", "p0"])
            second = await made.ask(prompt(30), longer)
        answer = await first
        async with asyncio.timeout(WAIT_S):
            await ending
        assert answer.ids == second.ids == alone(prompt(30), longer).ids
        assert answer.record is not None and second.record is not None
        assert (answer.record.decode_worker, second.record.decode_worker) == ("d0", "d1")
        await made.remove(old)
