"""One cell of the matrix: hold a request at a step, break a part, and see what becomes of it all.

another request streams, to be broken with it
    --> arm --> ask --> the step is reached: its request stands still --> strike --> let go
    --> (a worker that hangs goes on while another attempt has taken its place)
    --> the client's outcome, and every page back within the lease
    --> the next request works, while the fault lasts unless nobody but the victim could answer
    --> heal --> the victim serves again, and holds nothing either
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from pdserve.client import AsyncClient
from pdserve.client.events import Tokens
from pdserve.errors import DeadlineExceeded, PdserveError, Unavailable
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish
from tests.e2e.faults.house import WAIT_S, House
from tests.e2e.faults.place import LEASE_S, Place
from tests.e2e.faults.points import SOME_TOKENS
from tests.e2e.faults.questions import COMPANION, LONG, OUTPUT_LONG, SAMPLING, answers, question
from tests.e2e.faults.table import CELLS, Cell, Fault, Outcome, Part

BOUND_S = 10.0  # from the fault to the end of the request, whatever the end is; its deadline, too
PATIENCE_S = 2.0  # deadline of a request whose router hangs
SLACK_S = 1.0  # for the machine, on top of a lease

_ERRORS: dict[Outcome, type[PdserveError]] = {Outcome.LOST: Unavailable, Outcome.DEADLINE: DeadlineExceeded}


@dataclass
class Asked:
    """A request under way, as its client sees it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    ids: tuple[int, ...] = ()
    finish: Finish | None = None
    error: PdserveError | None = None
    ended_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def run(self, client: AsyncClient, timeout_s: float) -> None:
        events = client.generate(token_ids=self.prompt, sampling=self.sampling, timeout_s=timeout_s)
        try:
            async with aclosing(events):
                async for event in events:
                    assert self.finish is None, f"{event} after the finish"
                    if isinstance(event, Tokens):
                        assert event.first_index == len(self.ids), f"token {event.first_index} after {len(self.ids)}"
                        self.ids += event.ids
                    elif isinstance(event, Finish):
                        self.finish = event
                    self.changed.set()
        except PdserveError as error:
            self.error = error
        finally:
            self.ended_at = time.monotonic()
            self.changed.set()

    async def tokens(self, count: int) -> None:
        """Returns once so many have come, or it has ended."""
        async with asyncio.timeout(WAIT_S):
            while len(self.ids) < count and not self.ended_at:
                self.changed.clear()
                await self.changed.wait()


@dataclass(frozen=True)
class Result:
    """Figures of a cell that passed, in seconds."""

    cell: Cell
    ended_s: float  # fault to the end of the request
    error: str  # reason of the client's typed error, if that was to come
    freed_s: float  # end of the request, or the fault if that ended it, to no page held
    healed_s: float  # end of the fault to the victim's first answer


async def run(house: House, cell: Cell) -> Result:
    """Raises AssertionError for whatever is not as the table says; the house must then be repaired."""
    asked = Asked(question(CELLS.index(cell)), SAMPLING)
    companion = Asked(COMPANION, LONG)
    async with _running(house, cell, companion) if cell.has_companion else nullcontext():
        if cell.has_companion:
            await companion.tokens(1)
        reached = await house.arm(cell.reporter, cell.step)
        async with _running(house, cell, asked) as asking:
            place = await _reached(reached, asking, asked)
            await house.disarm(cell.reporter, place)
            victim = _victim(house, cell)
            struck_at = time.monotonic()
            healing = await _strike(house, cell, victim)
            before = len(companion.ids)
            second = await house.arm(Part.DECODE, cell.revived_at) if cell.revived_at else None
            if place.child is not None:
                place.child.go()  # whoever hangs finds it when it goes on
            if second is not None:
                await _revive_during(house, victim, await _reached(second, asking, asked))
            freed_at = await _free_without_answer(house, cell)
            async with asyncio.timeout(WAIT_S):
                await asking
        _check(cell, asked, asked.ended_at - struck_at)
        if cell.has_companion:
            await companion.tokens(before + SOME_TOKENS if cell.expected is Outcome.COMPLETE else OUTPUT_LONG)
    _check_companion(cell, companion)
    left_at = time.monotonic()
    if healing is not None:
        await healing
    finally_at = await house.free(LEASE_S + SLACK_S)
    if cell.part is not Part.ROUTER or cell.fault is Fault.SLOW:
        await house.ask()
    healed_at = time.monotonic()
    await _heal(house, cell, victim)
    await _serves_again(house, cell, victim)
    served_at = time.monotonic()
    await house.free(LEASE_S + SLACK_S)
    return Result(
        cell,
        ended_s=asked.ended_at - struck_at,
        error="" if asked.error is None else asked.error.reason,
        freed_s=freed_at - struck_at if freed_at else finally_at - left_at,
        healed_s=served_at - healed_at,
    )


@asynccontextmanager
async def _running(house: House, cell: Cell, asked: Asked) -> AsyncIterator[asyncio.Task[None]]:
    """A request; leaving it ends it as a client that goes away does."""
    deadline_s = PATIENCE_S if cell.expected is Outcome.DEADLINE else BOUND_S
    task = asyncio.create_task(asked.run(house.client, deadline_s))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _free_without_answer(house: House, cell: Cell) -> float | None:
    """When no worker held a page any more, for a request that the fault itself has ended."""
    return None if cell.expected is Outcome.COMPLETE else await house.free(LEASE_S + SLACK_S)


async def _revive_during(house: House, victim: str, other: Place) -> None:
    """While the attempt that took its place stands still at `other`, the victim goes on with its own, in vain."""
    assert await house.revive(victim) == "", "a push that another one had replaced was acknowledged"
    other.here.go()


async def _reached(point: asyncio.Future[Place], asking: asyncio.Task[None], asked: Asked) -> Place:
    """Who stands still there. Raises AssertionError when the request has ended, or has done nothing for long."""
    await asyncio.wait((point, asking), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert point.done(), f"the step was never reached: {asked}"
    return point.result()


def _victim(house: House, cell: Cell) -> str:
    """A name in the house; for Redis any."""
    prefill, decode = house.pair
    return {Part.PREFILL: prefill, Part.DECODE: decode}.get(cell.part, cell.part.value)


async def _strike(house: House, cell: Cell, victim: str) -> asyncio.Task[None] | None:
    """Returns once the fault is there; what a restart still does goes on in the task."""
    redis = house.redis if cell.part is Part.REDIS else None
    match cell.fault:
        case Fault.SLOW:
            house.slow(cell.part, victim)
        case Fault.HANG if redis:
            redis.freeze()
        case Fault.HANG:
            await house.freeze(victim)
        case Fault.DEATH | Fault.RESTART if redis:
            await asyncio.to_thread(redis.kill)
            if cell.fault is Fault.RESTART:
                return asyncio.create_task(asyncio.to_thread(redis.start))
        case Fault.DEATH | Fault.RESTART:
            await house.kill(victim)
            if cell.fault is Fault.RESTART:
                return asyncio.create_task(house.start(victim, same_ports=True))
    return None


async def _heal(house: House, cell: Cell, victim: str) -> None:
    match cell.fault:
        case Fault.SLOW:
            house.hurry()
        case Fault.HANG if cell.part is Part.REDIS:
            house.redis.thaw()
        case Fault.HANG if house.places[victim].frozen:
            house.thaw(victim)
        case Fault.DEATH if cell.part is Part.REDIS:
            await asyncio.to_thread(house.redis.start)
        case Fault.DEATH:
            await house.start(victim)


async def _serves_again(house: House, cell: Cell, victim: str) -> None:
    if cell.part is Part.ROUTER and cell.fault in (Fault.DEATH, Fault.RESTART):
        await house.ask_until_up()
    elif cell.part in (Part.ROUTER, Part.REDIS):
        await house.ask()
    else:
        await house.serves(victim)
    await house.all_here()


def _check(cell: Cell, asked: Asked, took_s: float) -> None:
    """What the client saw is what the table says, and soon enough."""
    seen = f"{asked.error!r}, {asked.finish}, {len(asked.ids)} tokens after {took_s:.1f} s"
    _check_tokens(asked)
    assert took_s < BOUND_S, seen
    if cell.expected is Outcome.COMPLETE:
        assert asked.error is None and asked.finish is not None, seen
    else:
        assert isinstance(asked.error, _ERRORS[cell.expected]) and asked.finish is None, seen


def _check_companion(cell: Cell, companion: Asked) -> None:
    """It was in mid stream, maybe on other workers: it has gone on, or come to the same end."""
    _check_tokens(companion)
    if companion.error is not None:
        assert cell.expected is not Outcome.COMPLETE, f"the other request: {companion.error!r}"
        assert isinstance(companion.error, _ERRORS[cell.expected]), f"the other request: {companion.error!r}"


def _check_tokens(asked: Asked) -> None:
    """They are the first of the right ones, and all of them before a finish."""
    right = answers()[asked.prompt]
    assert asked.ids == right[: len(asked.ids)], f"wrong tokens {asked.ids}, right are {right}"
    if asked.finish is not None:
        assert asked.ids == right and asked.finish.reason == "length", f"{asked.finish} after {asked.ids}"
        assert asked.finish.usage.output_tokens == len(right), asked.finish
