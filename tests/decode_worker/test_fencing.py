"""No two writers on one page, ever: a page changes hands only when its attempt is revoked and its writers are done.

Writers are held still in the middle of a page, half of its tokens written, while everything
else that could hand the page on is asked for.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import torch

from cache_transfer.pages import PageSink, Range
from cache_transfer.receiver import ReceivedLogits, ReceiveReport, ReceiverHost
from cache_transfer.tickets import Claim
from cache_transfer.wire import contract_to_proto
from decode_worker.worker import DecodeWorker
from pdserve.errors import Cancelled, Fenced, PdserveError
from pdserve.request import SamplingParams
from pdserve.v1 import decode_pb2, worker_pb2
from tests.decode_worker.prefill_side import Computed
from tests.decode_worker.rig import WAIT_S, Call, Rig, local, rig
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=3, seed=0)
Attempt = tuple[bytes, int]


class Guard:
    """Stands between a receiver and its host: sees every write, and who has which page meanwhile."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.faults: list[str] = []
        self.held = threading.Event()
        """A writer stands still in the middle of a page."""
        self._gate = threading.Event()
        self._gate.set()
        self._lock = threading.Lock()
        self._inside: list[tuple[int, Attempt]] = []
        self._worker = worker
        receiver = worker.pipeline.handoffs.receiver
        self._host: ReceiverHost = receiver._host
        receiver._host = self

    def hold(self) -> None:
        self.held.clear()
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    async def grant(self, claim: Claim) -> PageSink:
        sink = await self._host.grant(claim)
        pages = self._worker.pipeline.handoffs._sequences[claim.handoff_id].pages
        with self._lock:
            self.faults += [f"page {page} was granted to {claim} while {owner} wrote it"
                            for page, owner in self._inside if page in pages]  # fmt: skip
        return _GuardedSink(self, sink, (claim.handoff_id, claim.attempt), pages, self._worker.blocks.page_size)

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        self._over(claim)
        self._host.verified(claim, logits, report)

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        self._over(claim)
        self._host.aborted(claim, error)

    def _over(self, claim: Claim) -> None:
        with self._lock:
            if any(owner == (claim.handoff_id, claim.attempt) for _, owner in self._inside):
                self.faults.append(f"{claim} ended while it wrote")

    def enter(self, owner: Attempt, pages: Sequence[int]) -> None:
        with self._lock:
            for page, other in self._inside:
                if page in pages and other != owner:
                    self.faults.append(f"page {page} has two writers: {owner} and {other}")
            held = {page for each in self._worker.blocks.holdings().values() for page in each}
            self.faults += [f"page {page} is free and was written" for page in pages if page not in held]
            self._inside += [(page, owner) for page in pages]

    def leave(self, owner: Attempt, pages: Sequence[int]) -> None:
        with self._lock:
            for page in pages:
                self._inside.remove((page, owner))

    def stand_still(self) -> None:
        if not self._gate.is_set():
            self.held.set()
            assert self._gate.wait(WAIT_S)


class _GuardedSink:
    def __init__(self, guard: Guard, sink: PageSink, owner: Attempt, pages: tuple[int, ...], size: int) -> None:
        self._guard, self._sink, self._owner, self._pages, self._size = guard, sink, owner, pages, size

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        """In two halves, cut in the middle of a page where there is more than one token."""
        pages = sorted({self._pages[token // self._size] for token in range(*tokens)})
        self._guard.enter(self._owner, pages)
        try:
            cut = max(tokens[0], tokens[1] - 2)
            row = len(payload) // (tokens[1] - tokens[0])
            if cut > tokens[0]:
                self._sink.write(plane, layer, heads, (tokens[0], cut), payload[: row * (cut - tokens[0])])
            self._guard.stand_still()
            self._sink.write(plane, layer, heads, (cut, tokens[1]), payload[row * (cut - tokens[0]) :])
        finally:
            self._guard.leave(self._owner, pages)


def other_cache(r: Rig, ids: Sequence[int]) -> Computed:
    """Another prompt's cache and logits under this prompt's name: nothing of it may ever be read."""
    return r.prefill.compute([(token + 1) % 97 for token in ids])


async def retry(call: Call) -> None:
    await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(call.rig.prefill.contract)))


async def some_turns(r: Rig) -> None:
    """Whole round trips through the worker's event loop: what could happen by now has happened."""
    for _ in range(5):
        await r.about.Describe(worker_pb2.DescribeRequest())


async def test_a_page_is_not_handed_on_while_its_writer_stands_still() -> None:
    """Retry and another request both want the page; both wait for the writer; then both are answered right."""
    ids, others = prompt(11, seed=1), prompt(11, seed=2)
    async with rig(decode=tiny_engine(pages=4, deterministic=True)) as r, AsyncExitStack() as opened:
        guard = Guard(r.worker)
        first = await opened.enter_async_context(r.call(ids, PARAMS))
        admitted = await first.admitted()
        guard.hold()
        old = asyncio.create_task(r.push(admitted, other_cache(r, ids)))
        assert await asyncio.to_thread(guard.held.wait, WAIT_S)

        second = await opened.enter_async_context(r.call(others, PARAMS))
        pushed = asyncio.create_task(r.push(await second.admitted(), r.prefill.compute(others)))
        await retry(first)
        answer = asyncio.create_task(first.ticket())
        await some_turns(r)
        assert not answer.done() and not pushed.done()  # neither the next ticket nor the other's grant
        assert r.worker.blocks.held_count == 3

        guard.let_go()
        async with asyncio.timeout(WAIT_S):
            ticket = await answer
        assert ticket.attempt == 2
        with pytest.raises(Fenced):
            await old
        await asyncio.gather(pushed, r.push(admitted, r.prefill.compute(ids), ticket=ticket))
        expected = [each.ids for each in local([ids, others], PARAMS)]
        assert [(await first.answer()).ids, (await second.answer()).ids] == expected
        assert guard.faults == []


async def test_a_page_of_a_caller_that_went_away_is_not_handed_on_while_its_writer_stands_still() -> None:
    ids, others = prompt(11, seed=3), prompt(11, seed=4)
    async with rig(decode=tiny_engine(pages=4, deterministic=True)) as r:
        guard = Guard(r.worker)
        guard.hold()
        async with r.call(ids, PARAMS) as first:
            old = asyncio.create_task(r.push(await first.admitted(), other_cache(r, ids)))
            assert await asyncio.to_thread(guard.held.wait, WAIT_S)
        async with r.call(others, PARAMS) as second:
            pushed = asyncio.create_task(r.push(await second.admitted(), r.prefill.compute(others)))
            await some_turns(r)
            assert not pushed.done() and r.worker.blocks.held_count == 3
            guard.let_go()
            async with asyncio.timeout(WAIT_S):
                await pushed
            assert (await second.answer()).ids == local([others], PARAMS)[0].ids
        with pytest.raises((Fenced, Cancelled)):
            await old
        assert guard.faults == []


@pytest.mark.parametrize("seed", range(4))
async def test_retries_and_departures_at_random_never_share_a_page(seed: int) -> None:
    """Eight requests at a time on a pool that holds two; each page is handed on many times."""
    draw = random.Random(seed)
    async with rig(decode=tiny_engine(pages=8, deterministic=True), ticket_ttl_s=WAIT_S) as r:
        torch.manual_seed(seed)
        guard = Guard(r.worker)

        async def request(number: int, fate: str) -> None:
            ids = prompt(9 + number, seed=100 * seed + number)
            async with r.call(ids, PARAMS, request_id=str(number)) as call:
                admitted = await call.admitted()
                ticket = admitted.ticket
                if fate != "plain":
                    old = asyncio.create_task(r.push(admitted, other_cache(r, ids), layers=draw.randrange(3)))
                    for _ in range(draw.randrange(6)):
                        await r.about.Describe(worker_pb2.DescribeRequest())
                    if fate == "leaves":
                        call.call.cancel()
                    else:
                        await retry(call)
                        ticket = await call.ticket()
                    with pytest.raises(PdserveError):
                        await old
                if fate != "leaves":
                    await r.push(admitted, r.prefill.compute(ids), ticket=ticket)
                    assert (await call.answer()).ids == local([ids], PARAMS)[0].ids

        fates = [draw.choice(["plain", "retries", "leaves"]) for _ in range(8)]
        async with asyncio.timeout(2 * WAIT_S):
            await asyncio.gather(*(request(n, fate) for n, fate in enumerate(fates)))
        assert guard.faults == []
