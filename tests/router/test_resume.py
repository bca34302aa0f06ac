"""Answers that go on at another pair, after workers that break off, repeat themselves, or forget to finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdserve.engine.engine import Engine
from pdserve.errors import DataLoss, Exhausted, Internal, PdserveError, Unavailable
from pdserve.local import LocalRunner
from pdserve.registry.records import DECODE, PREFILL, READY, Load
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from router.backlog import Event
from router.failures import INTER_TOKEN_TIMEOUT, TOKENS_MISMATCH
from router.request import Ask, TokenPrompt
from router.wire import WORKER_LOST
from tests.engine.tiny import prompt
from tests.router.peers import BadDecode, BadPrefill, serving
from tests.router.support import ENGINE, VOCAB, House, bundle, finish_of, house, ids_of, model, record_of

IDS = prompt(50, seed=3, vocab=VOCAB)


def continued(first: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """`first`, and what the model adds to prompt and first, greedily, up to so many tokens together."""
    if len(first) == tokens:
        return first
    runner = LocalRunner(Engine(model(), ENGINE), bundle())
    params = SamplingParams(temperature=0, seed=0, max_tokens=tokens - len(first), ignore_eos=True)
    (output,) = runner.generate_batch([IDS + first], params)
    return first + output.ids


@asynccontextmanager
async def beginning(bad: dict[str, Any], decodes: int = 1, **settings: Any) -> AsyncIterator[tuple[House, BadDecode]]:
    """A house in which every request begins at a decode worker of this kind, "bad", beside `decodes` good ones."""
    async with house(decodes=0, **settings) as made:
        await made.add_decode("d0")
        peer = BadDecode(made.decodes[0].contract, **bad)
        async with serving(peer) as address:
            await made.add_ghost("bad", DECODE, address)
            made.make_look_busy("d0")
            if not decodes:
                await made.decodes.pop().stop()
                await made.router.pool.refresh()
            yield made, peer


async def failure(made: House, **sampling: Any) -> tuple[list[Event], PdserveError]:
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | sampling
    request = await made.router.intake.take(Ask(TokenPrompt(IDS), SamplingParams(**given)))
    events: list[Event] = []
    with pytest.raises(PdserveError) as caught:
        async for event in made.router.orchestrator.generate(request):
            events.append(event)
    return events, caught.value


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (None, WORKER_LOST),
        (Unavailable("going", reason="DRAINING"), "DRAINING"),
        (DataLoss("a byte"), "DATA_LOSS"),
    ],
)
async def test_a_stream_that_breaks_off_goes_on(end: PdserveError | None, reason: str) -> None:
    async with beginning({"tokens": 3, "end": end}) as (made, peer):
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True)
        assert ids_of(events) == continued((0, 1, 2), 8)
        assert (finish_of(events).usage.prompt_tokens, finish_of(events).usage.output_tokens) == (50, 8)
        batches = [event for event in events if isinstance(event, TokenBatch)]
        assert b"".join(batch.text for batch in batches).startswith(b"xxx")
        record = record_of(events)
        assert (record.attempts, record.decode_worker, peer.calls) == (2, "d0", 1)
        assert [(a.outcome, a.failed_worker, a.first_index, a.output_tokens) for a in record.history] == [
            (reason, "bad", 0, 3),
            ("length", "", 3, 5),
        ]


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gap": ({"tokens": 3, "shift": 1}, {}),
    "too many": ({"tokens": 9}, {}),
    "no token": ({"tokens": 3, "blank": True}, {}),
    "no logprobs": ({"tokens": 3}, {"logprobs": 1}),
    "wrong count": ({"tokens": 3, "end": Finish("stop"), "more": 1}, {}),
}


@pytest.mark.parametrize("name", WRONG)
async def test_tokens_that_are_not_those_due_are_not_forwarded(name: str) -> None:
    bad, sampling = WRONG[name]
    given = {"gap": 0, "too many": 8, "no token": 3, "no logprobs": 0, "wrong count": 3}[name]
    async with beginning(bad, decodes=0) as (made, _):
        events, error = await failure(made, **sampling)
        assert isinstance(error, Internal) and (error.reason, error.field) == (TOKENS_MISMATCH, "tokens")
        assert ids_of(events) == tuple(range(given))
        assert not any(isinstance(event, Finish) for event in events)
    async with beginning(bad) as (made, _):  # another worker does better
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True, **sampling)
        assert ids_of(events) == continued(tuple(range(given)), 8)
        assert record_of(events).history[0].outcome == TOKENS_MISMATCH
        assert finish_of(events).usage.output_tokens == 8


async def test_tokens_that_were_had_before_are_not_forwarded_again() -> None:
    """The second worker repeats what the first one gave."""
    async with beginning({"tokens": 3}) as (made, _):
        repeating = BadDecode(made.decodes[0].contract, tokens=3, shift=-2, end=Finish("stop"))
        async with serving(repeating) as address:
            await made.decodes.pop().stop()
            await made.add_ghost("repeating", DECODE, address)
            made.make_look_busy("repeating")
            events, error = await failure(made)
        assert ids_of(events) == (0, 1, 2) and error.reason == TOKENS_MISMATCH
        assert repeating.calls == 1


@pytest.mark.parametrize(("tokens", "sampling", "reason"), [(8, {}, "length"), (3, {"stop_token_ids": (2,)}, "stop")])
async def test_when_only_the_finish_is_missing_only_the_finish_comes(
    tokens: int, sampling: dict[str, Any], reason: str
) -> None:
    async with beginning({"tokens": tokens}) as (made, _):
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True, **sampling)
        finish = finish_of(events)
        assert ids_of(events) == tuple(range(tokens))
        assert (finish.reason, finish.usage.output_tokens) == (reason, tokens)
        last = record_of(events).history[-1]
        assert (last.outcome, last.output_tokens, last.computed_tokens, last.bytes_sent) == (reason, 0, 0, 0)


async def test_for_one_token_more_no_cache_travels() -> None:
    async with beginning({"tokens": 7}) as (made, _):
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True)
        assert ids_of(events) == continued(tuple(range(7)), 8)
        record = record_of(events)
        assert (record.sent_tokens, record.frames_sent) == (0, 0) and record.computed_tokens > 0


async def test_a_prefill_worker_that_fails_a_resumption_is_replaced_on_its_stream() -> None:
    prefill = BadPrefill(lies=1, error=Exhausted("full", reason="QUEUE_FULL"))
    async with beginning({"tokens": 3}) as (made, _), serving(prefill) as address:
        await made.add_ghost("quick", PREFILL, address)
        made.make_look_busy("p0")
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True)
        assert ids_of(events) == continued((0, 1, 2), 8)
        assert [(a.prefill_worker, a.decode_worker, a.outcome) for a in record_of(events).history] == [
            ("quick", "bad", WORKER_LOST),
            ("quick", "d0", "QUEUE_FULL"),
            ("p0", "d0", "length"),
        ]


@pytest.mark.parametrize("steps_go_on", [True, False])
async def test_a_worker_that_steps_is_busy_and_one_that_does_not_is_stuck(steps_go_on: bool) -> None:
    limit_s, go_on = 1.0, asyncio.Event()
    bad = {"tokens": 3, "wait": go_on, "end": Finish("stop")}
    async with beginning(bad, inter_token_timeout_s=limit_s) as (made, _):
        incarnation = made.member("bad").record.incarnation
        task = asyncio.create_task(made.generate(IDS, max_tokens=8, ignore_eos=True))
        for steps in range(1, 16):  # one and a half times the limit
            load = Load(pages_total=64, waiting_limit=8, steps=steps if steps_go_on else 1)
            await made.router.registry.heartbeat("bad", incarnation, READY, load)
            await asyncio.wait({task}, timeout=limit_s / 10)
        assert task.done() is not steps_go_on
        go_on.set()
        events = await task
        history = record_of(events).history
        if steps_go_on:
            assert ids_of(events) == (0, 1, 2) and [a.outcome for a in history] == ["stop"]
        else:
            assert [(a.outcome, a.failed_worker) for a in history[:1]] == [(INTER_TOKEN_TIMEOUT, "bad")]
            assert ids_of(events) == continued((0, 1, 2), 8)


async def test_an_admission_that_cannot_be_read_is_the_workers_fault() -> None:
    async with beginning({"change": lambda identity: replace(identity, prompt_digest=b"x")}) as (made, _):
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True)
        assert ids_of(events) == continued((), 8)
        assert [(a.outcome, a.failed_worker) for a in record_of(events).history] == [
            ("MALFORMED_EVENT", "bad"),
            ("length", ""),
        ]


async def test_what_follows_a_finish_is_not_forwarded() -> None:
    async with beginning({"tokens": 3, "end": Finish("stop"), "late": 2}) as (made, peer):
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True)
        assert ids_of(events) == (0, 1, 2) and finish_of(events).usage.output_tokens == 3
        assert peer.calls == record_of(events).attempts == 1


async def test_a_client_that_is_slow_is_not_the_workers_silence() -> None:
    limit_s = 0.2
    async with beginning({"tokens": 3, "end": Finish("stop")}, backlog_tokens=1, inter_token_timeout_s=limit_s) as (
        made,
        _,
    ):
        request = await made.router.intake.take(
            Ask(TokenPrompt(IDS), SamplingParams(temperature=0.0, max_tokens=8), want_record=True)
        )
        events: list[Event] = []
        async for event in made.router.orchestrator.generate(request):
            events.append(event)
            if isinstance(event, TokenBatch):
                await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=2 * limit_s)
        assert ids_of(events) == (0, 1, 2) and record_of(events).attempts == 1


async def test_without_a_registry_a_silent_worker_is_given_up_and_the_answer_goes_on() -> None:
    async with beginning({"tokens": 3, "wait": asyncio.Event()}, inter_token_timeout_s=0.5) as (made, _):
        made.router.pool.warning = "the registry cannot be reached"
        events = await made.generate(IDS, max_tokens=8, ignore_eos=True)
        assert ids_of(events) == continued((0, 1, 2), 8)
        assert [a.outcome for a in record_of(events).history] == [INTER_TOKEN_TIMEOUT, "length"]


async def test_the_deadline_ends_a_resumption() -> None:
    async with beginning({"tokens": 3}, request_timeout_s=1.5) as (made, _):
        deaf = BadDecode(made.decodes[0].contract, mute=True)
        async with serving(deaf) as address:
            await made.decodes.pop().stop()
            await made.add_ghost("deaf", DECODE, address)
            made.make_look_busy("deaf")
            events, error = await failure(made)
        assert ids_of(events) == (0, 1, 2) and error.reason == "DEADLINE_EXCEEDED"
        assert "after 3 tokens" in error.message and deaf.calls == 1


async def test_the_end_of_the_router_ends_a_resumption() -> None:
    async with beginning({"tokens": 3}) as (made, _):
        deaf = BadDecode(made.decodes[0].contract, mute=True)
        async with serving(deaf) as address:
            await made.decodes.pop().stop()
            await made.add_ghost("deaf", DECODE, address)
            made.make_look_busy("deaf")
            ending = asyncio.create_task(failure(made))
            await asyncio.wait_for(deaf.called.wait(), 10)
            made.router.orchestrator.end()
            events, error = await ending
        assert ids_of(events) == (0, 1, 2) and (type(error), error.reason) == (Unavailable, "DRAINING")
        assert made.router.orchestrator.active == 0


async def test_when_the_last_workers_are_lost_too_their_error_is_the_answers_end() -> None:
    """Never a finish; and a worker that was lost is not asked again."""
    lost = BadPrefill(lies=1, error=Unavailable("gone", reason=WORKER_LOST))
    async with beginning({"tokens": 3}) as (made, peer), serving(lost) as address:
        await made.add_ghost("quick", PREFILL, address)
        await made.add_ghost("gone", DECODE)
        await made.prefills.pop().stop()
        await made.router.pool.refresh()
        events, error = await failure(made)
        assert ids_of(events) == (0, 1, 2) and error.reason == WORKER_LOST
        assert not any(isinstance(event, Finish) for event in events)
        assert peer.calls == 1 and lost.calls <= 2


async def test_a_prefill_worker_is_free_while_the_answer_goes_on() -> None:
    """Else its later end would hide the work of others from placement."""
    go_on = asyncio.Event()
    prefill = BadPrefill(lies=1)
    async with beginning({"tokens": 3, "wait": go_on, "end": Finish("stop")}) as (made, _), serving(prefill) as address:
        await made.add_ghost("quick", PREFILL, address)
        made.make_look_busy("p0")
        request = await made.router.intake.take(Ask(TokenPrompt(IDS), SamplingParams(temperature=0.0, max_tokens=8)))
        quick, bad = made.member("quick"), made.member("bad")
        async for event in made.router.orchestrator.generate(request):
            if isinstance(event, TokenBatch):
                async with asyncio.timeout(10):  # its own answer may come after the token
                    while made.router.pool.load(quick) != quick.record.load:
                        await made.decodes_reachable()
                assert made.router.pool.load(bad).running == bad.record.load.running + 1
                go_on.set()
        assert made.router.pool.load(bad) == bad.record.load


@pytest.mark.parametrize("steps_between", range(4))
async def test_two_cancellations_leave_no_work_behind(steps_between: int) -> None:
    """As of a deadline and a client that leaves then: the second one meets the cleaning up after the first."""
    prefill = BadPrefill()
    async with beginning({"tokens": 3}) as (made, _), serving(prefill) as address:
        await made.add_ghost("hangs", PREFILL, address)
        made.make_look_busy("p0")
        request = await made.router.intake.take(Ask(TokenPrompt(IDS), SamplingParams(temperature=0.0, max_tokens=8)))
        asking = asyncio.create_task(anext(made.router.orchestrator.generate(request)))
        await asyncio.wait_for(prefill.called.wait(), 10)
        (running,) = [task for task in asyncio.all_tasks() if task.get_name() == request.id]
        running.cancel()
        for _ in range(steps_between):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, asking, return_exceptions=True)
        await asyncio.wait_for(prefill.cancelled.wait(), 10)
        for worker_id in ("hangs", "bad"):
            member = made.member(worker_id)
            assert made.router.pool.load(member) == member.record.load
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(request.id)]


async def test_a_client_that_leaves_during_a_resumption_leaves_no_work_behind() -> None:
    async with beginning({"tokens": 3}) as (made, _):
        deaf = BadDecode(made.decodes[0].contract, mute=True)
        async with serving(deaf) as address:
            await made.decodes.pop().stop()
            await made.add_ghost("deaf", DECODE, address)
            made.make_look_busy("deaf")
            before = made.router.pool.load(made.member("deaf"))
            asking = asyncio.create_task(failure(made))
            await asyncio.wait_for(deaf.called.wait(), 10)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await made.router.orchestrator.idle()
            assert made.router.pool.load(made.member("deaf")) == before
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("req-")]
