"""Answers that go on at another pair, after workers that break off, repeat themselves, or forget to finish."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pdserve.errors import DataLoss, Exhausted, Internal, PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL, READY, Load
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from router.backlog import Event
from router.failures import INTER_TOKEN_TIMEOUT, TOKENS_MISMATCH
from router.request import Ask, TokenPrompt
from router.wire import WORKER_LOST
from tests.router.orchestrated import IDS, failure_of
from tests.router.peers import BadDecode, BadPrefill, serving
from tests.router.resuming import beginning, continued
from tests.router.support import finish_of, ids_of, record_of


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
        events, error = await failure_of(made, **sampling)
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
            events, error = await failure_of(made)
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
