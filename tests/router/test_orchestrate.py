"""Requests through real workers: the good case, and every way a worker can fail one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cache_transfer.contract import HandoffIdentity
from pdserve.errors import (
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    Incompatible,
    Internal,
    InvalidRequest,
    PdserveError,
    Refused,
    Unavailable,
)
from pdserve.registry.records import DECODE, PREFILL
from pdserve.rpc.events import Accepted, Finish, HandoffRecord
from router.wire import WORKER_LOST
from tests.router.orchestrated import IDS, failure_of, request_of
from tests.router.peers import BadDecode, BadPrefill, another_tenant, serving
from tests.router.support import ENGINE, VOCAB, finish_of, house, ids_of, model, record_of


async def test_a_request_from_accepted_to_finish_and_its_record(caplog: pytest.LogCaptureFixture) -> None:
    async with house() as made:
        with caplog.at_level(logging.INFO, "router.record"):
            cold = await made.generate(IDS, max_tokens=12)
        assert isinstance(cold[0], Accepted) and cold[0].prompt_tokens == 50
        assert len(ids_of(cold)) == 12
        finish, record = finish_of(cold), record_of(cold)
        assert (finish.reason, finish.usage.prompt_tokens, finish.usage.output_tokens) == ("length", 50, 12)
        assert finish.usage.cached_prompt_tokens == 0
        assert (record.prefill_worker, record.decode_worker, record.attempts) == ("p0", "d0", 1)
        assert (record.prompt_tokens, record.computed_tokens, record.sent_tokens) == (50, 50, 50)
        # K and V of two layers, two KV heads of eight fp32, 50 tokens; and the logits.
        assert record.bytes_sent == 2 * 2 * 2 * 8 * 4 * 50 + 4 * VOCAB
        assert record.first_token_ms > record.prefill_ms > 0 and record.decode_tokens_per_s > 0
        (line,) = [r.getMessage() for r in caplog.records]
        assert json.loads(line.removeprefix("request "))["outcome"] == "length"

        warm = await made.generate(IDS, max_tokens=12)
        assert ids_of(warm) == ids_of(cold)
        assert record_of(warm).computed_tokens < 50
        assert finish_of(warm).usage.cached_prompt_tokens == 50 - record_of(warm).computed_tokens


async def test_one_token_needs_no_cache_to_travel() -> None:
    async with house() as made:
        events = await made.generate(IDS, max_tokens=1)
        assert (len(ids_of(events)), record_of(events).sent_tokens, record_of(events).frames_sent) == (1, 0, 0)


@pytest.mark.parametrize(("page_size", "axis_order"), [(8, "hnd"), (4, "nhd"), (2, "nhd")])
async def test_other_page_layouts_are_converted_and_the_answer_is_the_same(page_size: int, axis_order: str) -> None:
    async with house() as made:
        plain = await made.generate(IDS, max_tokens=10)
        await made.prefills[0].stop()
        del made.prefills[0]
        engine = replace(ENGINE, page_size=page_size, axis_order=axis_order)
        await made.add_prefill("other", engine=engine)
        converted = await made.generate(IDS, max_tokens=10)
        assert ids_of(converted) == ids_of(plain)
        codes = {d.code for d in record_of(converted).conversions}
        assert codes == {
            code
            for code, differs in (("PAGE_SIZE", page_size != 4), ("PAGE_AXIS_ORDER", axis_order != "hnd"))
            if differs
        }


async def test_a_dead_prefill_worker_is_replaced_on_the_same_decode_stream() -> None:
    async with house() as made:
        expected = ids_of(await made.generate(IDS, max_tokens=8))
        await made.add_ghost("ghost", PREFILL)
        made.make_look_busy("p0")
        events = await made.generate(IDS, max_tokens=8)
        assert ids_of(events) == expected
        record = record_of(events)
        assert (record.attempts, record.prefill_worker) == (2, "p0")
        assert any("prefill worker ghost" in note and WORKER_LOST in note for note in record.notes)
        assert [m.id for m in made.router.pool.ready("tiny")] == ["d0", "p0"]  # the ghost left the rotation


async def test_a_dead_decode_worker_is_replaced_by_another_pair() -> None:
    async with house() as made:
        await made.add_ghost("ghost", DECODE)
        made.make_look_busy("d0")
        events = await made.generate(IDS, max_tokens=8)
        assert len(ids_of(events)) == 8
        assert (record_of(events).attempts, record_of(events).decode_worker) == (2, "d0")
        assert "ghost" not in [m.id for m in made.router.pool.ready("tiny")]


async def test_a_pair_that_failed_leaves_the_prefill_workers_other_pairs_to_try() -> None:
    peer = BadPrefill(Exhausted("full"))
    async with house(prefills=0, decodes=2) as made, serving(peer) as address:
        await made.add_ghost("full", PREFILL, address)
        _, error = await failure_of(made)
        assert isinstance(error, Exhausted)
        assert peer.calls == 2  # once for each decode worker, and no pair twice


async def test_attempts_are_bounded() -> None:
    peer = BadPrefill(Exhausted("full"))
    async with house(prefills=0, decodes=3, max_attempts=2) as made, serving(peer) as address:
        await made.add_ghost("full", PREFILL, address)
        await failure_of(made)
        assert peer.calls == 2


async def test_attempts_end_with_the_untried_pairs() -> None:
    async with house(prefills=0) as made:
        for number in range(3):
            await made.add_ghost(f"ghost{number}", PREFILL)
        events, error = await failure_of(made)
        assert isinstance(error, Unavailable) and error.reason == WORKER_LOST
        assert [type(event) for event in events] == [Accepted, HandoffRecord]
        with pytest.raises(Unavailable) as caught:
            await request_of(made)
        assert caught.value.reason == "NO_PREFILL_WORKER"


@pytest.mark.parametrize(
    "error",
    [
        Exhausted("full", reason="QUEUE_FULL"),
        DataLoss("a byte"),
        DeadlineExceeded("lease"),
        Incompatible("changed", field="MODEL_DIGEST"),
    ],
)
async def test_what_another_prefill_worker_may_do_better_is_tried_there(error: PdserveError) -> None:
    peer = BadPrefill(error)
    async with house() as made, serving(peer) as address:
        await made.add_ghost("bad", PREFILL, address)
        made.make_look_busy("p0")
        events = await made.generate(IDS, max_tokens=8)
        assert (len(ids_of(events)), record_of(events).attempts, peer.calls) == (8, 2, 1)
        assert any(error.reason in note for note in record_of(events).notes)
        assert "bad" in [m.id for m in made.router.pool.ready("tiny")]  # it answered: it is alive


async def test_a_ticket_that_came_to_nothing_is_not_the_clients_business() -> None:
    peer = BadPrefill(Refused("the ticket has expired", reason="TICKET_EXPIRED", remedy="ask for a new ticket"))
    async with house(prefills=0) as made, serving(peer) as address:
        await made.add_ghost("bad", PREFILL, address)
        _, found = await failure_of(made)
        assert isinstance(found, Unavailable) and found.reason == "NO_ATTEMPT_LEFT" and found.retry_after_ms
        assert "TICKET_EXPIRED" in str(found) and "new ticket" not in str(found)


@pytest.mark.parametrize("error", [InvalidRequest("no", field="prompt_ids"), Internal("no")])
async def test_what_no_worker_would_do_better_surfaces_at_once(error: PdserveError) -> None:
    peer = BadPrefill(error)
    async with house() as made, serving(peer) as address:
        await made.add_ghost("bad", PREFILL, address)
        made.make_look_busy("p0")
        _, found = await failure_of(made)
        assert (type(found), found.field, peer.calls) == (type(error), error.field, 1)


@pytest.mark.parametrize("end", [None, Unavailable("going"), Exhausted("full")])
async def test_a_decode_worker_that_fails_before_the_first_token_is_replaced(end: PdserveError | None) -> None:
    async with house() as made, serving(BadDecode(made.decodes[0].contract, end=end)) as address:
        await made.add_ghost("bad", DECODE, address)
        made.make_look_busy("d0")
        events = await made.generate(IDS, max_tokens=8)
        assert (len(ids_of(events)), record_of(events).decode_worker) == (8, "d0")
        assert sum(isinstance(event, Accepted) for event in events) == 1


async def test_a_decode_worker_that_is_silent_is_given_up() -> None:
    async with (
        house(admit_timeout_s=1.0) as made,
        serving(BadDecode(made.decodes[0].contract, mute=True)) as address,
    ):
        await made.add_ghost("mute", DECODE, address)
        made.make_look_busy("d0")
        events = await made.generate(IDS, max_tokens=8)
        assert record_of(events).attempts == 2


async def test_a_failure_among_the_tokens_that_no_worker_would_do_better_is_a_typed_error() -> None:
    async with house() as made:
        bad = BadDecode(made.decodes[0].contract, tokens=3, end=Internal("broken"))
        async with serving(bad) as address:
            await made.add_ghost("bad", DECODE, address)
            made.make_look_busy("d0")
            events, error = await failure_of(made)
            assert ids_of(events) == (0, 1, 2)
            assert not any(isinstance(event, Finish) for event in events)
            assert (type(error), error.reason, bad.calls) == (Internal, "INTERNAL", 1)


@pytest.mark.parametrize(
    ("changes", "change", "field"),
    [({}, another_tenant, "IDENTITY.tenant"), ({"model_digest": b"x" * 32}, lambda identity: identity, "MODEL_DIGEST")],
    ids=["another identity", "changed since the snapshot"],
)
async def test_a_worker_that_admits_something_else_is_left_for_one_that_fits(
    changes: dict[str, Any], change: Callable[[HandoffIdentity], HandoffIdentity], field: str
) -> None:
    async with house() as made:
        told = replace(made.decodes[0].contract, **changes)
        bad = BadDecode(told, tokens=1, end=Finish("stop"), change=change)
        async with serving(bad) as address:
            await made.add_ghost("bad", DECODE, address)
            made.make_look_busy("d0")
            events = await made.generate(IDS, max_tokens=4)
            assert (len(ids_of(events)), record_of(events).decode_worker, bad.calls) == (4, "d0", 1)
            assert record_of(events).history[0].failed_worker == "bad"
            await made.decodes.pop().stop()
            await made.router.pool.refresh()
            events, error = await failure_of(made)
            assert [type(event) for event in events] == [HandoffRecord] and isinstance(error, Incompatible)
            assert error.field == field


async def test_an_incompatible_pool_gives_the_difference_before_any_work() -> None:
    async with house(decodes=0) as made:
        await made.add_decode("stranger", of=model(seed=1))
        with pytest.raises(Incompatible) as caught:
            await made.generate(IDS)
        assert [d.code for d in caught.value.differences] == ["MODEL_DIGEST"]
        await made.add_decode("fits")
        events = await made.generate(IDS, max_tokens=4)
        assert record_of(events).decode_worker == "fits"
        assert any("stranger refused: MODEL_DIGEST" in note for note in record_of(events).notes)

        # `house` ends by asserting that the decode worker holds nothing.
