"""Aborts that race with everything else, under load: nothing happens, or one clean end; others never notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from decode_worker.sequence import EXITS, Outcome, Sequence, State
from pdserve.errors import Cancelled, Fenced, PdserveError, Refused
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish
from tests.decode_worker.rig import Call, Rig, local, rig
from tests.decode_worker.test_bounds import send_retry
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
LONG = replace(PARAMS, max_tokens=60)
LOAD = tuple(prompt(11, seed=50 + n) for n in range(3))


@asynccontextmanager
async def loaded() -> AsyncIterator[Rig]:
    """A worker with a pool that is short, three streams that compute meanwhile, and their answers checked."""
    decode = tiny_engine(deterministic=True, pages=48)
    async with rig(decode=decode, growth_watermark=0.0, max_queue=64, recompute_tokens=8) as r:
        others = [asyncio.create_task(r.generate(ids, LONG)) for ids in LOAD]
        yield r
        answers = await asyncio.gather(*others)
        assert [a.ids for a in answers] == [w.ids for w in local(LOAD, LONG)]
        assert not r.worker.broken.is_set()


def outcomes(r: Rig) -> list[Outcome]:
    """Fills with one entry per sequence that leaves."""
    left: list[Outcome] = []
    told = r.worker.pipeline.scheduler.on_exit

    def noted(sequence: Sequence, outcome: Outcome) -> None:
        left.append(outcome)
        told(sequence, outcome)

    r.worker.pipeline.scheduler.on_exit = noted
    return left


async def push_quietly(r: Rig, call: Call) -> None:
    """A push whose request may be gone by now."""
    try:
        admitted = await call.admitted()
        await r.push(admitted, r.prefill.compute(call.ids))
    except (Refused, Fenced, Cancelled):
        pass


@pytest.mark.parametrize("seed", range(2))
async def test_callers_leave_at_any_moment(seed: int) -> None:
    draw = random.Random(seed)
    async with loaded() as r:
        left = outcomes(r)
        wanted = local([prompt(9)], PARAMS)[0].ids

        async def one(events: int) -> None:
            """Reads so many events of a request, if there are, then cancels, which may be after its end."""
            call = r.call(prompt(9), PARAMS)
            async with call:
                if events == 0:
                    return
                await push_quietly(r, call)
                ids: tuple[int, ...] = ()
                for _ in range(events - 1):
                    event = await call.event()
                    ids += tuple(event.tokens.ids)
                    if event.WhichOneof("event") == "finish":
                        assert ids == wanted
                        break
                assert ids == wanted[: len(ids)]

        await asyncio.gather(*(one(draw.randrange(9)) for _ in range(40)))
        await r.describe_until(lambda: len(r.worker.pipeline.sequences) <= len(LOAD))
        keys = [outcome.key for outcome in left]
        assert len(keys) == len(set(keys))  # nobody left twice
        assert {o.state for o in left} <= {State.DONE, State.ABORTED}


async def test_an_abort_while_the_last_token_is_booked_changes_nothing() -> None:
    async with loaded() as r:
        scheduler, pipeline = r.worker.pipeline.scheduler, r.worker.pipeline
        left, complete = outcomes(r), scheduler.complete

        def raced(sequence: Sequence, finish: Finish) -> None:
            if sequence.request.request_id != "racing":
                complete(sequence, finish)
                return
            complete(sequence, finish)
            pipeline.end(sequence, State.ABORTED, Cancelled("too late"))

        scheduler.complete = raced  # type: ignore[method-assign]
        answer = await r.generate(prompt(9), PARAMS, request_id="racing")
        assert answer.ids == local([prompt(9)], PARAMS)[0].ids
        assert [o.state for o in left if o.key.startswith("racing")] == [State.DONE]


async def test_an_abort_between_a_step_and_its_last_token_is_one_clean_end() -> None:
    async with loaded() as r:
        pipeline, left = r.worker.pipeline, outcomes(r)
        apply = pipeline.scheduler.apply

        def raced(plan: object, output: object) -> int:
            for sequence in pipeline.scheduler.running:
                last = len(sequence.generation.output) == PARAMS.max_tokens - 1  # type: ignore[operator]
                if sequence.request.request_id == "racing" and last:
                    pipeline.end(sequence, State.ABORTED, Cancelled("just in time"))
                    pipeline.end(sequence, State.FAILED, Refused("the first reason counts"))
            return apply(plan, output)  # type: ignore[arg-type]

        pipeline.scheduler.apply = raced  # type: ignore[method-assign]
        with pytest.raises(Cancelled):
            await r.generate(prompt(9), PARAMS, request_id="racing")
        assert [o.state for o in left if o.key.startswith("racing")] == [State.ABORTED]


async def test_aborts_of_what_has_ended_or_never_was_are_no_ops() -> None:
    async with loaded() as r:
        pipeline, left = r.worker.pipeline, outcomes(r)
        async with r.call(prompt(9), PARAMS, request_id="queued") as call:
            admitted = await call.admitted()
            [queued] = [s for s in pipeline.sequences if s.key.startswith("queued")]
            for state in (State.ABORTED, State.FAILED, State.EXPIRED):
                pipeline.end(queued, state, Refused(f"{state}"))
            with pytest.raises(Refused, match="aborted"):
                await call.answer()
            for _ in range(2):
                pipeline.end(queued, State.ABORTED, Refused("again"))
            assert queued.state is State.ABORTED and queued.state in EXITS
            with pytest.raises(Refused) as caught:  # its ticket is unknown from now on
                await r.push(admitted, r.prefill.compute(call.ids))
            assert caught.value.reason == "TICKET_UNKNOWN"
        assert [o.state for o in left if o.key.startswith("queued")] == [State.ABORTED]
        async with r.call(prompt(9), PARAMS, request_id="done") as call:
            await push_quietly(r, call)
            await call.answer()
            await send_retry(r, call)  # after the end: nobody reads it
            call.call.cancel()


async def test_an_abort_while_its_pages_are_granted_or_written_gives_every_page_back() -> None:
    async with loaded() as r:
        for layers in (0, 1, 2):
            async with r.call(prompt(9), PARAMS, request_id=f"cut{layers}") as call:
                sender = r.sender(await call.admitted(), r.prefill.compute(call.ids), layers=layers)
                pushing = asyncio.create_task(sender.run())
                key = f"cut{layers}"
                await r.describe_until(
                    lambda key=key: any(s.pages for s in r.worker.pipeline.sequences if s.key.startswith(key))  # type: ignore[misc]
                )
            with pytest.raises(PdserveError):
                await pushing
        await r.describe_until(lambda: not any("cut" in owner for owner in r.worker.blocks.holdings()))
