"""A request that is cancelled at each step of the protocol: the work of it ends, on both sides, at once.

One row per step and part that can stand still there, one column per way to cancel. Nobody lets
the held part go: cancelling alone must free it. Only a layer that is being computed cannot be
reached; what is held by threads is otherwise in test_cancellation.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import httpx
import pytest
import pytest_asyncio

from cache_transfer.receiver import Receiver
from cache_transfer.transport import GrpcTransport
from decode_worker import service as decode_service
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from router import planner
from router.request import Ask, TokenPrompt
from router.wire import DecodeCall
from tests.e2e.faults.points import Points, watch_decode, watch_prefill, watch_router
from tests.e2e.faults.table import Part, Step
from tests.e2e.stack import MODEL, Stack, alone_on, stack
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.engine.tiny import prompt
from tests.router.support import VOCAB, bundle, model

pytestmark = pytest.mark.asyncio(loop_scope="module")

FREE_S = 1.0  # all work of a cancelled request is over, on both sides
TOKENS = 40
PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=TOKENS, ignore_eos=True)
IDS = prompt(40, vocab=VOCAB)  # three chunks of prefill
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the cat sat on the log " * 12}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}


class Held(Points):
    """Points of this process: the armed one is reached once, and only cancellation leads on from there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._step: Step | None = None

    def arm(self, step: Step) -> None:
        self._step = step
        self.reached.clear()

    def tell(self, *message: object) -> None:
        pass

    async def reach(self, step: Step) -> None:
        if step == self._step:
            self._step = None
            self.reached.set()
            await asyncio.Event().wait()


class House:
    def __init__(self, made: Stack, held: dict[Part, Held]) -> None:
        self.made = made
        self.held = held


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[House]:
    held = {part: Held() for part in (Part.PREFILL, Part.DECODE, Part.ROUTER)}
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (decode_service, "DecodeService"),
            (Receiver, "receive"),
            (GrpcTransport, "open"),
            (DecodeCall, "next"),
            (planner, "place"),
        ):
            patch.setattr(owner, name, getattr(owner, name))  # so that it comes back at the end
        watch_prefill(held[Part.PREFILL])
        watch_decode(held[Part.DECODE])
        watch_router(held[Part.ROUTER])
        async with stack(settle_s=WAIT_S) as made:
            await made.add_prefill(WatchedEngine(model(), engine().config), bundle=bundle())
            await made.add_decode(WatchedEngine(model(), engine().config), bundle=bundle())
            yield House(made, held)


async def through_grpc(made: Stack) -> None:
    async with aclosing(made.client.generate(token_ids=IDS, sampling=PARAMS, timeout_s=60.0)) as events:
        async for _ in events:
            pass


async def through_http(made: Stack, stream: bool) -> None:
    async with (
        httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=WAIT_S) as http,
        http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": stream}) as answer,
    ):
        async for _ in answer.aiter_lines():
            pass


async def through_http_stream(made: Stack) -> None:
    await through_http(made, stream=True)


async def through_http_whole(made: Stack) -> None:
    await through_http(made, stream=False)


async def inside_the_router(made: Stack) -> None:
    request = await made.router.intake.take(Ask(TokenPrompt(IDS), PARAMS, want_record=True), "default")
    async with aclosing(made.router.orchestrator.generate(request)) as events:
        async for _ in events:
            pass


Way = Callable[[Stack], Awaitable[None]]
WAYS: dict[str, Way] = {
    "grpc": through_grpc,
    "http-stream": through_http_stream,
    "http-whole": through_http_whole,
    "router": inside_the_router,
}
STEPS = [
    (Step.ADMIT, Part.DECODE),
    (Step.ADMIT, Part.ROUTER),
    (Step.OPEN, Part.PREFILL),
    (Step.OPEN, Part.DECODE),
    (Step.GRANT, Part.DECODE),
    (Step.GRANT, Part.PREFILL),
    (Step.MID_FRAMES, Part.PREFILL),
    (Step.MID_FRAMES, Part.DECODE),
    (Step.LOGITS, Part.PREFILL),
    (Step.LOGITS, Part.DECODE),
    (Step.COMMIT, Part.PREFILL),
    (Step.COMMIT, Part.DECODE),
    (Step.FIRST_TOKEN, Part.DECODE),
    (Step.FIRST_TOKEN, Part.ROUTER),
    (Step.MID_STREAM, Part.DECODE),
    (Step.MID_STREAM, Part.ROUTER),
    (Step.RELEASE, Part.DECODE),
    (Step.RELEASE, Part.ROUTER),
    (Step.RELEASE, Part.PREFILL),
]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("step", "part"), STEPS, ids=[f"{step}-{part}" for step, part in STEPS])
async def test_cancelled(house: House, step: Step, part: Part, way: Way) -> None:
    held = house.held[part]
    held.arm(step)
    asking = asyncio.ensure_future(way(house.made))
    async with asyncio.timeout(WAIT_S):
        await held.reached.wait()
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    await house.made.check_free(FREE_S)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_cancelled_between_two_layers_of_a_chunk(house: House, way: Way) -> None:
    """The layer that runs is the last one of it."""
    made, computing = house.made, house.made.prefills[0].engine
    assert isinstance(computing, WatchedEngine) and computing.spec.layers > 1
    steps, layers = len(computing.steps), computing.layers_begun
    with computing.held():
        asking = asyncio.ensure_future(way(made))
        async with asyncio.timeout(WAIT_S):
            await computing.inside.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await made.until(lambda: all(p.dropped for p in made.prefills[0].pipeline.scheduler.running), FREE_S)
        await made.until(lambda: not made.decodes[0].pipeline.sequences, FREE_S)
        assert made.prefills[0].blocks.held_count, "the step writes them still"
    await made.check_free(FREE_S)
    assert (len(computing.steps), computing.layers_begun) == (steps, layers + 1)


async def test_afterwards_all_is_as_before(house: House) -> None:
    runner = LocalRunner(WatchedEngine(model(), engine(pages=256).config), chunk_tokens=16)
    assert (await house.made.ask(IDS, PARAMS)).ids == alone_on(runner, IDS, PARAMS).ids
