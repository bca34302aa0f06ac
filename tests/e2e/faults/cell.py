"""One cell of the matrix: hold a request at a step, break a part, and see what becomes of it all.

    arm --> ask --> the step is reached: its request stands still --> strike --> let go
        --> (a worker that hangs goes on while another attempt has taken its place)
        --> the client's outcome, and every page back within the lease
        --> the next request works, while the fault lasts unless nobody but the victim could answer
        --> heal --> the victim serves again, and holds nothing either
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field

from pdserve.client import AsyncClient
from pdserve.client.events import Finish, Tokens
from pdserve.errors import DeadlineExceeded, PdserveError, Unavailable
from tests.e2e.faults.house import LEASE_S, OUTPUT, SAMPLING, WAIT_S, House, Place, answers, question
from tests.e2e.faults.table import CELLS, Cell, Fault, Outcome, Part

BOUND_S = 8.0  # from the fault to the end of the request, whatever the end is; its deadline, too
PATIENCE_S = 2.0  # deadline of a request whose router hangs
SLACK_S = 1.0  # for the machine, on top of a lease

_ERRORS: dict[Outcome, type[PdserveError]] = {Outcome.LOST: Unavailable, Outcome.DEADLINE: DeadlineExceeded}


@dataclass
class Asked:
    """A request under way, as its client sees it."""

    ids: tuple[int, ...] = ()
    finish: Finish | None = None
    error: PdserveError | None = None
    ended_at: float = 0.0


@dataclass(frozen=True)
class Result:
    """Figures of a cell that passed, in seconds."""

    cell: Cell
    ended_s: float  # fault to the end of the request
    error: str  # reason of the client's typed error, if that was to come
    freed_s: float  # end of the request, or the fault if that ended it, to no page held
    healed_s: float  # end of the fault to the victim's first answer
    took_s: float = field(compare=False)


async def run(house: House, cell: Cell) -> Result:
    """Raises AssertionError for whatever is not as the table says; the house must then be repaired."""
    began = time.monotonic()
    ids = question(CELLS.index(cell))
    reached = await house.arm(cell.reporter, cell.step)
    asked = Asked()
    asking = asyncio.create_task(_ask(house.client, ids, asked, _deadline_s(cell)))
    try:
        place = await asyncio.wait_for(asyncio.shield(reached), WAIT_S)
        await house.disarm(cell.reporter, place)
        victim = _victim(house, cell)
        struck_at = time.monotonic()
        healing = await _strike(house, cell, victim)
        second = await house.arm(Part.DECODE, cell.revived_at) if cell.revived_at else None
        if place.child is not None:
            place.child.go()  # whoever hangs finds it when it goes on
        if second is not None:
            await _revive_during(house, victim, await asyncio.wait_for(asyncio.shield(second), WAIT_S))
        freed_at = await _free_without_answer(house, cell)
        await asyncio.wait_for(asking, WAIT_S)
        if healing is not None:
            await healing
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    _check(cell, asked, answers()[ids], asked.ended_at - struck_at)
    finally_at = await house.free(LEASE_S + SLACK_S)
    freed_s = freed_at - struck_at if freed_at else finally_at - asked.ended_at
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
        freed_s=freed_s,
        healed_s=served_at - healed_at,
        took_s=time.monotonic() - began,
    )


async def _free_without_answer(house: House, cell: Cell) -> float | None:
    """When no worker held a page any more, for a request that the fault itself has ended."""
    return None if cell.expected is Outcome.COMPLETE else await house.free(LEASE_S + SLACK_S)


async def _revive_during(house: House, victim: str, other: Place) -> None:
    """While the attempt that took its place stands still at `other`, the victim goes on with its own, in vain."""
    assert await house.revive(victim) == "", "a push that another one had replaced was acknowledged"
    other.here.go()


async def _ask(client: AsyncClient, ids: tuple[int, ...], asked: Asked, timeout_s: float) -> None:
    events = client.generate(token_ids=ids, sampling=SAMPLING, timeout_s=timeout_s)
    try:
        async with aclosing(events):
            async for event in events:
                assert asked.finish is None, f"{event} after the finish"
                if isinstance(event, Tokens):
                    assert event.first_index == len(asked.ids), f"token {event.first_index} after {len(asked.ids)}"
                    asked.ids += event.ids
                elif isinstance(event, Finish):
                    asked.finish = event
    except PdserveError as error:
        asked.error = error
    asked.ended_at = time.monotonic()


def _deadline_s(cell: Cell) -> float:
    return PATIENCE_S if cell.expected is Outcome.DEADLINE else BOUND_S


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
    if cell.part is Part.ROUTER:
        await house.ask_until_up()
    await house.all_here()
    if cell.part in (Part.PREFILL, Part.DECODE):
        await house.serves(victim)
    elif cell.part is Part.REDIS:
        await house.ask()


def _check(cell: Cell, asked: Asked, right: tuple[int, ...], took_s: float) -> None:
    """What the client saw is what the table says, and soon enough."""
    seen = f"{asked.error!r}, {asked.finish}, {len(asked.ids)} tokens after {took_s:.1f} s"
    assert asked.ids == right[: len(asked.ids)], f"wrong tokens {asked.ids}, right are {right}"
    assert took_s < BOUND_S, seen
    if cell.expected is Outcome.COMPLETE:
        assert asked.error is None and asked.finish is not None, seen
        assert asked.ids == right and asked.finish.reason == "length", seen
        assert asked.finish.usage.output_tokens == OUTPUT, seen
    else:
        assert isinstance(asked.error, _ERRORS[cell.expected]) and asked.finish is None, seen
