"""Ways to lose a decode worker among the tokens, how often, and what stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import httpx
import pytest

from decode_worker.worker import DecodeWorker
from pdserve.errors import DeadlineExceeded, PdserveError, Unavailable
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, HandoffRecord, TokenBatch
from pdserve.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from router.backlog import Event
from router.failures import INTER_TOKEN_TIMEOUT
from router.request import Ask, TokenPrompt
from router.wire import WORKER_LOST
from tests.e2e.resuming import IDS, Reader, Scene, alone, check, cut_off, lose, scene
from tests.e2e.stack import MODEL
from tests.e2e.watched import WAIT_S

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=16, frequency_penalty=0.5, logprobs=1)
EXPECTED = alone(GREEDY)
SILENCE_S = 0.8


@pytest.mark.parametrize(("way", "outcome"), [("drains", "DRAINING"), ("cut off", WORKER_LOST)])
async def test_a_worker_that_leaves(way: str, outcome: str) -> None:
    async with scene() as it, it.stopped(GREEDY, 3) as (task, worker, stopping):
        leaving = asyncio.create_task(it.made.remove(worker) if way == "drains" else cut_off(worker))
        if way == "drains":
            await it.made.until(lambda: any(s.ending for s in worker.pipeline.sequences))
            stopping.let_go()
        async with asyncio.timeout(WAIT_S):
            await leaving
            answer = await task
        check(answer, EXPECTED)
        assert answer.record is not None
        first, second = answer.record.history
        assert (first.outcome, first.failed_worker, first.output_tokens) == (outcome, worker.worker_id, 3)
        assert (second.outcome, second.first_index, second.output_tokens) == ("length", 3, 13)
        if way == "cut off":
            stopping.let_go()
            await it.made.until(lambda: not worker.pipeline.sequences and not worker.blocks.held_count)
            await it.made.remove(worker)


async def test_a_worker_that_stands_still_and_then_goes_on() -> None:
    """The router gives it up; what it does later disturbs nobody, and its pages come back."""
    async with scene(inter_token_timeout_s=SILENCE_S) as it, it.stopped(GREEDY, 3) as (task, worker, stopping):
        async with asyncio.timeout(WAIT_S):
            answer = await task
        check(answer, EXPECTED)
        assert answer.record is not None and answer.record.history[0].outcome == INTER_TOKEN_TIMEOUT
        assert answer.record.decode_worker != worker.worker_id
        assert worker.blocks.held_count > 0  # a step writes them still
        stopping.let_go()
        await it.made.check_free()
        assert len(answer.ids) == 16  # and not one more


async def test_two_losses_in_one_answer() -> None:
    async with scene(decodes=3) as it:
        for each in it.engines:
            each.stop_at(2)
        reader = Reader(it.made, IDS, GREEDY)
        task = asyncio.create_task(reader.read())
        left = dict(zip(it.engines, it.made.decodes, strict=True))
        for tokens in (2, 5):
            await it.made.until(lambda: any(each.inside.is_set() for each in left))
            (at,) = [each for each in left if each.inside.is_set()]
            await it.made.until(partial(reader.has, tokens))
            worker = left.pop(at)
            for each in left:
                each.stop_at(3)
            lose(worker)
            at.let_go()
        for each in left:
            each.let_go()
        async with asyncio.timeout(WAIT_S):
            answer = await task
        check(answer, EXPECTED)
        assert answer.record is not None
        assert [a.first_index for a in answer.record.history] == [0, 2, 5]
        assert len({a.decode_worker for a in answer.record.history}) == 3


@pytest.mark.parametrize("way", [lose, cut_off])
async def test_a_loss_while_the_client_reads_slowly(way: Callable[[DecodeWorker], object]) -> None:
    """Tokens wait in the router, and on their way to it, when it is lost."""
    params = replace(GREEDY, max_tokens=60)
    async with scene(decodes=1, backlog_tokens=4) as it:
        stopping, lost = it.engines[0], it.made.decodes[0]
        stopping.stop_at(40)
        request = await it.made.router.intake.take(Ask(TokenPrompt(IDS), params))
        got: list[Event] = []
        async with aclosing(it.made.router.orchestrator.generate(request)) as events:
            while not isinstance(event := await anext(events), TokenBatch):
                continue
            got.append(event)
            async with asyncio.timeout(WAIT_S):
                await stopping.inside.wait()
            await it.add_decode("d1")
            result = way(lost)
            if asyncio.iscoroutine(result):
                await result
            stopping.let_go()
            async for event in events:
                got.append(event)
                await it.made.router.pool.refresh()  # a little time, in which tokens pile up
        expected = alone(params)
        batches = [event for event in got if isinstance(event, TokenBatch)]
        assert len(batches[0].ids) < 40 < len(expected.ids)
        assert tuple(token for batch in batches for token in batch.ids) == expected.ids
        assert b"".join(batch.text for batch in batches) == expected.text
        assert tuple(entry for batch in batches for entry in batch.logprobs) == expected.tokens.logprobs
        assert isinstance(got[-1], Finish) and got[-1].usage.output_tokens == 60
        await it.made.remove(lost)


async def test_a_late_clean_up_does_not_touch_the_next_attempt_on_the_same_worker() -> None:
    """The first attempt's pages are held by a running step when the second one gets its own."""
    async with scene(prefills=2, decodes=1) as it, it.stopped(GREEDY, 3) as (task, worker, stopping):
        lose(worker)
        await it.made.until(lambda: len(worker.blocks.holdings()) >= 2 and len(worker.pipeline.scheduler.running) == 2)
        old, new = worker.pipeline.scheduler.running
        assert old.key.partition("#")[0] == new.key.partition("#")[0] != old.key
        # They share whole pages of the prompt, which both refer to, and no page that either writes.
        shared = set(old.pages) & set(new.pages)
        assert shared == set(new.pages[: len(shared)]) and len(shared) == len(IDS) // 4
        stopping.let_go()
        async with asyncio.timeout(WAIT_S):
            check(await task, EXPECTED)


async def test_with_nobody_left_it_is_a_typed_error_and_what_was_delivered_is_counted() -> None:
    async with scene(decodes=1) as it:
        reader = Reader(it.made, IDS, GREEDY)
        with pytest.raises(Unavailable) as caught:
            async with it.stopped(GREEDY, 5, reader=reader) as (task, worker, stopping):
                lose(worker)
                stopping.let_go()
                async with asyncio.timeout(WAIT_S):
                    await task
        assert caught.value.reason == "ENDED"
        assert reader.ids == EXPECTED.ids[:5]
        assert not any(isinstance(event, Finish) for event in reader.events)
        record = reader.events[-1]
        assert isinstance(record, HandoffRecord)
        assert (record.outcome, record.output_tokens, record.attempts) == ("ENDED", 5, 1)
        assert record.history[0].failed_worker == "d0"


async def test_the_error_event_counts_what_was_delivered() -> None:
    """As it is on the wire."""
    async with scene(decodes=1) as it:
        it.engines[0].stop_at(4)
        stub = gateway_pb2_grpc.GatewayStub(it.made.channels.get(it.made.router.address))
        options = common_pb2.SamplingOptions(temperature=0, seed=0, max_tokens=16)
        message = gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenPrompt(ids=IDS), sampling=options)
        got: list[gateway_pb2.GenerateEvent] = []
        call = stub.Generate(message, timeout=WAIT_S)
        while sum(len(event.tokens.ids) for event in got) < 4:
            got.append(await call.read())
        async with asyncio.timeout(WAIT_S):
            await it.engines[0].inside.wait()
        lose(it.made.decodes[0])
        last = await call.read()
        assert last.WhichOneof("event") == "error" and last.error.reason == "ENDED"
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (len(IDS), 4)
        it.engines[0].let_go()


@pytest.mark.parametrize("decodes", [1, 2])
async def test_over_http(decodes: int) -> None:
    """The stream goes on without a seam, or ends in an error event with the counts, and never in [DONE]."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "cat"}], "max_tokens": 16, "ignore_eos": True,
        "temperature": 0, "stream": True, "pdserve_record": True,
    }  # fmt: skip
    async with scene(decodes=decodes, chat=True) as it:
        async with httpx.AsyncClient(base_url=f"http://{it.made.router.http_address}", timeout=WAIT_S) as http:
            whole = (await http.post("/v1/chat/completions", json={**body, "stream": False})).json()
            for each in it.engines:
                each.stop_at(6)
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await it.made.until(lambda: any(each.inside.is_set() for each in it.engines))
                (at,) = [n for n, each in enumerate(it.engines) if each.inside.is_set()]
                for n, each in enumerate(it.engines):
                    if n != at:
                        each.let_go()
                lose(it.made.decodes[at])
                it.engines[at].let_go()
                data = [line.removeprefix("data: ") async for line in lines if line]
        check_stream(it, data, whole)


def check_stream(it: Scene, data: list[str], whole: dict[str, object]) -> None:
    chunks = [httpx.Response(200, text=text).json() for text in data if text != "[DONE]"]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c.get("choices"))
    expected: str = whole["choices"][0]["message"]["content"]  # type: ignore[index]
    record = chunks[-1]["pdserve_record"]
    assert whole["pdserve_record"]["outcome"] == "length"  # type: ignore[index]
    if len(it.engines) > 1:
        assert text == expected and data[-1] == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert [attempt["outcome"] for attempt in record["history"]] == ["ENDED", "length"]
    else:
        assert text and expected.startswith(text) and "[DONE]" not in data
        assert chunks[-1]["error"]["code"] == "ended" and chunks[-1]["usage"]["completion_tokens"] == 6
        assert (record["outcome"], record["output_tokens"]) == ("ENDED", 6)


async def test_the_number_of_attempts_is_bounded_in_mid_stream_too() -> None:
    async with scene(max_attempts=1) as it:
        with pytest.raises(Unavailable) as caught:
            async with it.stopped(GREEDY, 2) as (task, worker, stopping):
                lose(worker)
                stopping.let_go()
                async with asyncio.timeout(WAIT_S):
                    await task
        assert caught.value.reason == "ENDED"


async def test_the_deadline_is_the_requests_and_not_the_attempts() -> None:
    """The second worker stands still as well, and so does the first one when it is asked again: no new time begins."""
    async with scene(inter_token_timeout_s=0.5) as it:
        for each in it.engines:
            each.stop_at(2)
        with pytest.raises(PdserveError) as caught:
            await it.made.ask(IDS, GREEDY, timeout_s=3.0)
        assert isinstance(caught.value, DeadlineExceeded)
        assert all(each.inside.is_set() for each in it.engines)
        for each in it.engines:
            each.let_go()


async def test_an_answer_that_goes_on_can_lose_its_pages_to_another_and_get_them_back() -> None:
    """It replays twice: what another worker gave, and what this one had computed before it was preempted."""
    params, other = replace(GREEDY, max_tokens=40), tuple(reversed(IDS))
    async with scene(decodes=1) as it:
        stopping, doomed = it.engines[0], it.made.decodes[0]
        stopping.stop_at(10)
        reader = Reader(it.made, IDS, params)
        task = asyncio.create_task(reader.read())
        await it.made.until(partial(reader.has, 10))
        async with asyncio.timeout(WAIT_S):
            await stopping.inside.wait()
        await it.add_decode("d1", pages=22)  # of 4 tokens: less than two answers of 70
        small, worker = it.engines[1], it.made.decodes[1]
        # Placement keeps away from the first worker.
        (member,) = [m for m in it.made.router.pool.members() if m.id == "d0"]
        it.made.router.pool.begin(member, 0, 10_000)
        small.stop_at(3)
        neighbour = asyncio.create_task(it.made.ask(other, params))
        async with asyncio.timeout(WAIT_S):
            await small.inside.wait()
        lose(doomed)
        await it.made.until(lambda: len(worker.pipeline.scheduler.running) == 2)
        small.let_go()
        stopping.let_go()
        async with asyncio.timeout(WAIT_S):
            check(await task, alone(params))
            check(await neighbour, alone(params, other))
        accounts = await it.made._accounts(worker)
        assert accounts.preemptions > 0
