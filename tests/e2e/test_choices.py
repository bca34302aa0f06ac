"""Several outputs of one prompt through the whole service: one prefill, one transfer, n decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from pdserve.client import Completion, Finish, Tokens
from pdserve.errors import PdserveError, Unavailable
from pdserve.local import LocalRunner
from pdserve.registry.records import CHOICES, GRAMMAR, SPECIAL_TOKENS, SPLIT
from pdserve.request import SamplingParams
from pdserve.v1 import worker_pb2
from tests.e2e.stack import FREE_S, Stack, pair, stack
from tests.e2e.watched import engine
from tests.engine.tiny import prompt, tiny_engine

DRAWN = SamplingParams(seed=21, max_tokens=30, temperature=1.1, top_p=0.98, frequency_penalty=0.1, logprobs=1)
IDS = prompt(45, seed=2)  # eleven pages of four, and one token


def separately(ids: Sequence[int], params: SamplingParams, n: int) -> list[tuple[int, ...]]:
    """What one process answers that computes the prompt anew for each choice."""
    runner = LocalRunner(tiny_engine(deterministic=True, pages=256), chunk_tokens=7)
    outputs: list[tuple[int, ...]] = [()] * n
    for event in runner.generate(ids, params, n=n):
        outputs[event.choice] += getattr(event, "ids", ())
    return outputs


def ids_of(answer: Completion) -> list[tuple[int, ...]]:
    return [choice.ids for choice in answer.choices]


async def counted(made: Stack) -> dict[str, int]:
    """What both workers count, at the first of each pool."""
    accounts = await made._accounts(made.decodes[0])
    assert isinstance(accounts, worker_pb2.AccountsResponse)
    names = ("handoffs", "forks", "shared_pages", "copied_pages")
    return {name: getattr(accounts, name) for name in names}


@pytest.mark.parametrize("mode", ["always", "never", "auto"])
async def test_one_prefill_and_one_transfer_feed_all_choices(mode: str) -> None:
    """By the record, by both workers' own counters, and by the bytes that travelled."""
    n = 8
    async with pair(disaggregate=mode) as made:
        answer = await made.ask(IDS, DRAWN, n=n)
        assert ids_of(answer) == separately(IDS, DRAWN, n)
        assert len(set(ids_of(answer))) == n
        assert [choice.finish.choice for choice in answer.choices] == list(range(n))
        record = answer.record
        assert record is not None and record.choices == n and record.prefills == 1
        here = record.history[0].placement == "decode"
        assert here == (mode == "never") or mode == "auto"
        assert record.transfers == (0 if here else 1)
        assert record.computed_tokens == len(IDS)  # once
        pages = {"forks": n, "shared_pages": 12 * n, "copied_pages": n - 1}
        assert await counted(made) == {"handoffs": record.transfers, **pages}
        assert (record.shared_pages, record.copied_pages) == (12 * n, n - 1)
        assert answer.usage.prompt_tokens == len(IDS)
        assert answer.usage.output_tokens == record.output_tokens == sum(map(len, ids_of(answer)))
        if mode == "always":
            single = await made.ask(prompt(45, seed=3), DRAWN)
            assert single.record is not None and record.bytes_sent == single.record.bytes_sent
            assert (single.record.choices, single.record.shared_pages) == (1, 0)


async def test_a_seed_makes_all_choices_repeatable_and_a_warm_cache_changes_nothing() -> None:
    async with pair() as made:
        cold = await made.ask(IDS, DRAWN, n=3)
        warm = await made.ask(IDS, DRAWN, n=3)
        assert ids_of(cold) == ids_of(warm) == separately(IDS, DRAWN, 3)
        assert (cold.usage.cached_prompt_tokens, warm.usage.cached_prompt_tokens) == (0, 44)
        other = await made.ask(IDS, replace(DRAWN, seed=22), n=3)
        assert not set(ids_of(other)) & set(ids_of(cold))


@pytest.mark.parametrize("mode", ["always", "never"])
async def test_choices_go_on_at_another_worker_where_theirs_died(mode: str) -> None:
    """Some have ended, some are in the middle: each goes on after its own tokens, and no end comes twice."""
    params = replace(DRAWN, max_tokens=60, stop_token_ids=tuple(range(0, 97, 9)), logprobs=0)
    wanted = separately(IDS, params, 6)
    assert len({len(ids) for ids in wanted}) > 2
    async with stack(disaggregate=mode) as made:
        await made.add_prefill()
        await made.add_decode()
        await made.add_decode()
        got: list[tuple[int, ...]] = [()] * 6
        ends: list[int] = []
        removed = False
        events = made.client.generate(token_ids=IDS, sampling=params, n=6, timeout_s=60, want_record=True)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Tokens):
                    got[event.choice] += event.ids
                elif isinstance(event, Finish):
                    ends.append(event.choice)
                if ends and not removed and len(ends) < 5:
                    removed = True
                    await made.remove(next(worker for worker in made.decodes if worker.pipeline.count))
        assert removed and got == wanted and sorted(ends) == list(range(6))


@pytest.mark.parametrize("after", ["the first tokens", "an end"])
async def test_a_client_that_goes_away_stops_all_choices(after: str) -> None:
    params = replace(DRAWN, max_tokens=400, logprobs=None)
    if after == "an end":
        params = replace(params, stop_token_ids=(separately(IDS, replace(params, max_tokens=9), 3)[1][4],))
    kind: Callable[[object], bool] = lambda e: isinstance(e, Finish if after == "an end" else Tokens)  # noqa: E731
    async with pair() as made:
        async with aclosing(made.client.generate(token_ids=IDS, sampling=params, n=3, timeout_s=60)) as events:
            while not kind(await anext(events)):
                continue
        await made.check_free(FREE_S)


async def test_choices_of_several_requests_share_a_batch_and_a_small_pool() -> None:
    """They lose pages to each other, and every answer is that of one that was alone."""
    params = replace(DRAWN, max_tokens=24, logprobs=None)
    async with stack() as made:
        await made.add_prefill()
        await made.add_decode(engine(pages=40))
        prompts = [prompt(20 + n, seed=n) for n in range(3)]
        answers = await asyncio.gather(*(made.ask(ids, params, n=4) for ids in prompts))
        for ids, answer in zip(prompts, answers, strict=True):
            assert ids_of(answer) == separately(ids, params, 4)
        assert (await made._accounts(made.decodes[0])).preemptions > 0


async def test_workers_of_an_older_version_never_get_what_they_would_ignore() -> None:
    """They do not say that they follow grammars or several choices: others are taken, or it is refused by name."""
    asked = replace(DRAWN, max_tokens=4, logprobs=None)
    async with pair() as made:
        old = made.decodes[0]
        old.capabilities = frozenset({GRAMMAR})
        await old._heartbeat._registry.register(old.record())  # type: ignore[union-attr]
        await made.router.pool.refresh()
        with pytest.raises(Unavailable) as refused:
            await made.ask(IDS, asked, n=2)
        assert (refused.value.reason, refused.value.field) == ("NOT_CAPABLE", "n")
        assert len((await made.ask(IDS, asked)).ids) == 4
        await made.add_decode()
        for _ in range(4):
            answer = await made.ask(IDS, asked, n=2)
            assert answer.record is not None and answer.record.decode_worker == "d1"
        told = {worker.worker_id: worker.capabilities for worker in (await made.client.status()).workers}
        assert told == {"p0": (), "d0": (GRAMMAR,), "d1": (CHOICES, GRAMMAR, SPECIAL_TOKENS, SPLIT)}
        await made.remove(made.decodes[1])
        old.capabilities = frozenset({CHOICES})
        await old._heartbeat._registry.register(old.record())  # type: ignore[union-attr]
        await made.router.pool.refresh()
        with pytest.raises(PdserveError) as no_grammar:
            await made.client.complete(token_ids=IDS, regex="a+", max_tokens=4)
        assert (no_grammar.value.reason, no_grammar.value.field) == ("NOT_CAPABLE", "grammar")
