"""Several outputs of one prompt: one cache comes, each choice goes its own way from it, on a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from decode_worker.sequence import State
from pdserve.errors import Internal, InvalidRequest, PdserveError
from pdserve.request import MAX_CHOICES, SamplingParams
from pdserve.rpc.convert import finish_from_proto, tokens_from_proto
from pdserve.rpc.events import LENGTH, STOP, Finish, TokenBatch
from pdserve.v1 import decode_pb2, worker_pb2
from tests.decode_worker.rig import Call, Rig, local, rig
from tests.decode_worker.small_bundle import small_bundle
from tests.engine.tiny import prompt, tiny_engine

DRAWN = SamplingParams(
    seed=5, max_tokens=14, temperature=1.2, top_p=0.97, repetition_penalty=1.1, frequency_penalty=0.2, logprobs=2
)
PAGE = 4


@dataclass
class Told:
    """What a stream said about one choice."""

    batches: list[TokenBatch]
    finish: Finish

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for batch in self.batches for token in batch.ids)

    @property
    def text(self) -> bytes:
        return b"".join(batch.text for batch in self.batches)

    @property
    def said(self) -> tuple[object, ...]:
        """All that must not depend on what else was asked."""
        logprobs = tuple(entry for batch in self.batches for entry in batch.logprobs)
        finish = replace(self.finish, choice=0, shared_pages=0, copied_pages=0)
        return self.ids, self.text, logprobs, finish


def opened(*choices: int, outputs: dict[int, Sequence[int]] | None = None) -> dict[str, Any]:
    """The fields of an opening that asks for these, with what some of them have."""
    had = outputs or {}
    return {
        "choices": [
            decode_pb2.OpenChoice(choice=n, output_ids=had.get(n, ()), forwarded_tokens=len(had.get(n, ())))
            for n in choices
        ]
    }


async def read(call: Call, count: int) -> dict[int, Told]:
    """To the last of so many ends; each choice's tokens must come in order and before its end."""
    batches: dict[int, list[TokenBatch]] = {}
    told: dict[int, Told] = {}
    while len(told) < count:
        event = await call.event()
        kind = event.WhichOneof("event")
        if kind == "tokens":
            batch = tokens_from_proto(event.tokens)
            assert batch.choice not in told
            batches.setdefault(batch.choice, []).append(batch)
        elif kind == "finish":
            finish = finish_from_proto(event.finish)
            told[finish.choice] = Told(batches.get(finish.choice, []), finish)
        else:
            assert kind == "prefilled", event
    return told


async def ask(
    r: Rig, ids: Sequence[int], params: SamplingParams, *choices: int, here: bool = False, **more: Any
) -> dict[int, Told]:
    """One request for these choices, handed over or computed there."""
    fields = opened(*choices, outputs=more.pop("outputs", None))
    if not here:
        async with r.call(ids, params, **fields) as call:
            await r.push(await call.admitted(), r.prefill.compute(ids))
            return await read(call, len(choices))
    call = r.call(ids, params, prefill_here=True, **fields)
    call._opening.ClearField("prefill_contract")
    async with call:
        assert (await call.admitted()).prefill_here
        return await read(call, len(choices))


@pytest.mark.parametrize("here", [False, True], ids=["handed over", "computed here"])
@pytest.mark.parametrize("length", [7, 8, 13], ids="{} prompt tokens".format)
async def test_each_choice_has_the_bits_of_a_request_of_its_own(length: int, here: bool) -> None:
    """One cache came for all; the counters say what was shared, and what had to be copied."""
    ids, count = prompt(length), 5
    async with rig() as r:
        together = await ask(r, ids, DRAWN, *range(count), here=here)
        accounts = await r.about.Accounts(worker_pb2.AccountsRequest())
        pages = -(-length // PAGE)
        copied = count - 1 if length % PAGE else 0
        assert accounts.handoffs == (0 if here else 1)
        assert (accounts.forks, accounts.shared_pages, accounts.copied_pages) == (count, count * pages, copied)
        assert [told.finish.shared_pages for told in together.values()] == [pages] * count
        assert sum(told.finish.copied_pages for told in together.values()) == copied
        assert len({told.ids for told in together.values()}) == count  # they do differ
    async with rig() as r:
        for number, told in together.items():
            alone = await ask(r, ids, DRAWN, number, here=here)
            assert alone[number].said == told.said
    [single] = local([ids], DRAWN)
    assert (single.ids, single.tokens.logprobs) == (together[0].ids, together[0].said[2])


async def test_choices_end_each_for_its_own_reason() -> None:
    bundle = small_bundle()
    params = replace(DRAWN, logprobs=None, max_tokens=24, temperature=1.5)
    async with rig(bundle=bundle) as r:
        free = await ask(r, prompt(9), params, *range(4))
        piece = free[2].text[6:9].decode(errors="replace")
        token = free[1].ids[4]
        told = await ask(r, prompt(9), replace(params, stop=(piece,), stop_token_ids=(token,)), *range(4))
        for number, one in told.items():
            ended = one.finish
            assert free[number].text.startswith(one.text)
            assert ended.usage.prompt_tokens == 9 and ended.usage.output_tokens == len(one.ids)
            assert (ended.reason == LENGTH) == (ended.stop_string is None and ended.stop_token_id is None)
        assert told[1].finish.reason == STOP and told[2].finish.reason == STOP
        assert told[2].finish.stop_string == piece or told[2].finish.stop_token_id == token


@pytest.mark.parametrize("here", [False, True], ids=["handed over", "computed here"])
async def test_one_token_each(here: bool) -> None:
    """A handoff brings logits only, and no page is held."""
    params = replace(DRAWN, max_tokens=1)
    async with rig() as r:
        told = await ask(r, prompt(9), params, *range(6), here=here)
        whole = await ask(r, prompt(9), DRAWN, *range(6), here=here)
        assert {n: one.ids for n, one in told.items()} == {n: one.ids[:1] for n, one in whole.items()}


@pytest.mark.parametrize("here", [False, True], ids=["handed over", "computed here"])
async def test_choices_go_on_where_another_worker_left_them(here: bool) -> None:
    """Each from its own place: before its first token, after one, in the middle; the ended ones are not asked again."""
    ids = prompt(10)
    async with rig() as r:
        whole = await ask(r, ids, DRAWN, *range(5), here=here)
        for had in ({0: 0, 1: 1, 2: 5, 4: 13}, {3: 9}, {1: 2, 2: 14}):
            outputs = {n: whole[n].ids[:count] for n, count in had.items()}
            rest = await ask(r, ids, DRAWN, *had, here=here, outputs=outputs)
            for number, count in had.items():
                assert rest[number].ids == whole[number].ids[count:]
                assert rest[number].finish.usage == whole[number].finish.usage


async def test_when_all_of_them_are_complete_no_cache_is_asked_for() -> None:
    async with rig() as r:
        whole = await ask(r, prompt(6), DRAWN, 0, 1)
        async with r.call(prompt(6), DRAWN, **opened(0, 1, outputs={n: whole[n].ids for n in (0, 1)})) as call:
            told = await read(call, 2)
        assert [one.ids for one in told.values()] == [(), ()]


@pytest.mark.parametrize("pages", [9, 12])
async def test_choices_take_turns_in_a_pool_that_holds_one(pages: int) -> None:
    """They lose pages to each other, and say the same."""
    params = replace(DRAWN, max_tokens=20)
    ids = prompt(13)  # 8 pages with all of the output
    async with rig() as r:
        wanted = await ask(r, ids, params, *range(4))
    engine = tiny_engine(deterministic=True, pages=pages)
    async with rig(decode=engine) as r:
        for here in (False, True):
            told = await ask(r, ids, params, *range(4), here=here)
            assert {n: one.said for n, one in told.items()} == {n: one.said for n, one in wanted.items()}
        assert r.worker.pipeline.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("when", ["before its cache", "at its first tokens", "after an end"])
async def test_a_caller_that_goes_away_frees_all_of_them(when: str) -> None:
    params = replace(DRAWN, max_tokens=200)
    async with rig(max_unread_tokens=8) as r:
        if when == "after an end":
            free = await ask(r, prompt(9), replace(params, max_tokens=40, logprobs=None), 0, 1)
            params = replace(params, stop_token_ids=(free[0].ids[3],))
        async with r.call(prompt(9), params, **opened(0, 1, 2)) as call:
            admitted = await call.admitted()
            if when != "before its cache":
                await r.push(admitted, r.prefill.compute(prompt(9)))
                kind = "finish" if when == "after an end" else "tokens"
                while (await call.event()).WhichOneof("event") != kind:
                    continue
        await r.describe_until(lambda: r.worker.pipeline.scheduler.idle)


async def test_one_choice_that_fails_ends_the_others() -> None:
    """An answer is all of its choices, or an error."""
    params = replace(DRAWN, max_tokens=200)
    async with rig(max_unread_tokens=8) as r, r.call(prompt(9), params, **opened(0, 1, 2)) as call:
        await r.push(await call.admitted(), r.prefill.compute(prompt(9)))
        await call.event()
        running = r.worker.pipeline.scheduler.running
        assert len(running) == 3
        r.worker.pipeline.end(running[1], State.FAILED, Internal("broken", reason="SAMPLER_FAILED"))
        with pytest.raises(PdserveError) as caught:
            while True:
                async with asyncio.timeout(10):
                    await call.event()
        assert caught.value.reason == "SAMPLER_FAILED"
        await r.describe_until(lambda: r.worker.pipeline.scheduler.idle)


async def test_a_failed_handoff_may_be_tried_again_for_all_of_them() -> None:
    async with rig() as r:
        wanted = await ask(r, prompt(11), DRAWN, 0, 1, 2)
        async with r.call(prompt(11), DRAWN, **opened(0, 1, 2)) as call:
            admitted, computed = await call.admitted(), r.prefill.compute(prompt(11))
            with pytest.raises(PdserveError):
                await r.push(admitted, computed, logits=computed.logits[:-4])
            await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=call._opening.prefill_contract))
            ticket = await call.ticket()
            admitted.identity.start = ticket.held_tokens
            await r.push(admitted, computed, ticket=ticket)
            told = await read(call, 3)
        assert {n: one.said for n, one in told.items()} == {n: one.said for n, one in wanted.items()}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (opened(0, 1, 1), "two have one number"),
        (opened(0, MAX_CHOICES), f"{MAX_CHOICES} is not below"),
        ({**opened(0, 1), "output": (3,)}, "output_ids"),
    ],
    ids=["twice the same", "a number too large", "output beside them"],
)
async def test_choices_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    async with rig() as r, r.call(prompt(5), DRAWN, **fields) as call:
        with pytest.raises(InvalidRequest, match=problem) as caught:
            await call.event()
        assert (caught.value.reason, caught.value.field) == ("INVALID_CHOICES", "choices")


async def test_output_of_one_choice_that_it_cannot_have_is_refused() -> None:
    async with rig() as r, r.call(prompt(5), DRAWN, **opened(0, 3, outputs={3: (1,) * 15})) as call:
        with pytest.raises(InvalidRequest) as caught:
            await call.event()
        assert caught.value.reason == "INVALID_OUTPUT_IDS"


async def test_a_reader_that_stops_reading_pauses_all_choices_and_loses_nothing() -> None:
    params = replace(DRAWN, max_tokens=40)
    async with rig() as r:
        wanted = await ask(r, prompt(9), params, 0, 1, 2)
    async with rig(max_unread_tokens=6) as r, r.call(prompt(9), params, **opened(0, 1, 2)) as call:
        await r.push(await call.admitted(), r.prefill.compute(prompt(9)))
        await r.describe_until(lambda: all(s.stream.full_since for s in r.worker.pipeline.scheduler.running))
        told = await read(call, 3)
        assert {n: one.said for n, one in told.items()} == {n: one.said for n, one in wanted.items()}
