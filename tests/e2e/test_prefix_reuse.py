"""Prefixes that either side already holds: right answers at every split, and exact counts.

A worker finds whole pages of its own page size and never the last token of a prompt: its logits
must be computed. What decode holds does not travel, what prefill holds is not computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import httpx
import pytest
import pytest_asyncio
import torch

from pdserve.client import AsyncClient, Completion
from pdserve.engine.checks import TOLERANCES
from pdserve.errors import InvalidRequest
from tests.e2e.prefixes import GREEDY, LENGTH, expected, found, whole
from tests.e2e.stack import Stack, Worker, pair, stack
from tests.e2e.test_fast_mode import near_tie
from tests.e2e.watched import WatchedEngine, engine
from tests.engine.tiny import prompt
from tests.router.support import MODEL, house

pytestmark = pytest.mark.asyncio(loop_scope="module")

WARM = replace(GREEDY, max_tokens=2)  # the shortest output whose prompt's cache decode keeps, and one token more


def forget(worker: Worker) -> None:
    """Evicts every prefix that nobody uses now."""
    worker.blocks.allocate("everything", worker.blocks.available_count)
    worker.blocks.release("everything")


@dataclass
class Split:
    """The service with pages of these sizes."""

    made: Stack
    prefill_page: int
    decode_page: int
    deterministic: bool = True

    async def check(self, ids: tuple[int, ...], split: int, prefill: bool = True, decode: bool = True) -> None:
        """Asks for the first `split` tokens, then for all. The flags say which side still holds them by then."""
        made, held = self.made, 0
        if split:
            first = await made.ask(ids[:split], WARM)
            # Decode also holds the one output token that it computed: by chance the prompt's next.
            held = split + (split < LENGTH and first.ids[0] == ids[split])
        for worker, keeps in ((made.prefills[0], prefill), (made.decodes[0], decode)):
            if not keeps:
                forget(worker)
        got = await made.ask(ids, GREEDY)
        assert found(got) == (
            whole(split if prefill else 0, self.prefill_page),
            whole(held if decode else 0, self.decode_page),
        )
        self.compare(got, ids)

    def compare(self, got: Completion, ids: tuple[int, ...]) -> None:
        answer = expected(ids, self.deterministic)
        if self.deterministic:
            assert got.ids == answer.ids
            assert self.made.first_logits(got) == answer.first_logits
            return
        first = torch.frombuffer(bytearray(self.made.first_logits(got)), dtype=torch.float32)
        error = (first - answer.logits[0]).abs().max() / answer.logits[0].abs().max()
        assert error <= TOLERANCES["fp32"]
        bound = near_tie(answer.logits, TOLERANCES["fp32"])
        assert got.ids[:bound] == answer.ids[:bound]


SIZES = [(1, 16), (4, 1), (16, 4)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SIZES, ids=str)
async def split(request: pytest.FixtureRequest) -> AsyncIterator[Split]:
    prefill, decode = request.param
    async with pair(engine(page_size=prefill, pages=512), engine(page_size=decode, pages=512)) as made:
        yield Split(made, prefill, decode)


async def test_every_split_of_a_prompt_is_the_same_prompt(split: Split) -> None:
    for tokens in range(LENGTH + 1):
        await split.check(prompt(LENGTH, seed=tokens), tokens)


@pytest.mark.parametrize(("prefill", "decode"), [(False, True), (True, False)], ids=["decode", "prefill"])
async def test_each_side_may_be_the_only_one_that_holds_it(split: Split, prefill: bool, decode: bool) -> None:
    """Warm decode with none to all of the prompt's pages, and prefill likewise."""
    for tokens in (1, 16, 33, LENGTH):
        await split.check(prompt(LENGTH, seed=1000 + tokens), tokens, prefill, decode)


async def test_every_split_in_fast_mode_is_within_the_margin() -> None:
    sizes = (16, 4)
    engines = [engine(page_size=size, pages=512, deterministic=False) for size in sizes]
    async with pair(*engines) as made:
        fast = Split(made, *sizes, deterministic=False)
        for tokens in range(LENGTH + 1):
            await fast.check(prompt(LENGTH, seed=tokens), tokens)


@pytest.mark.parametrize("tail", [0, 1])
async def test_a_whole_prompt_that_both_sides_hold_is_run_for_its_last_token_once(split: Split, tail: int) -> None:
    """The same prompt three times, a whole number of pages of 16 long or one token longer."""
    length = 32 + tail
    ids = prompt(length, seed=2000 + length)
    answers = [await split.made.ask(ids, GREEDY)]
    prefill, decode = split.made.prefills[0].engine, split.made.decodes[0].engine
    assert isinstance(prefill, WatchedEngine) and isinstance(decode, WatchedEngine)
    for _ in range(2):
        prefill.steps.clear()
        decode.steps.clear()
        answers.append(await split.made.ask(ids, GREEDY))
        computed = [chunk for step in prefill.steps for chunk in step.plan.chunks]
        at_prefill, at_decode = found(answers[-1])
        # Pages are found whole, so the last token's page is computed: with pages of one, or one token over, that alone.
        assert (at_prefill, at_decode) == tuple(
            whole(length, size, length) for size in (split.prefill_page, split.decode_page)
        )
        assert sum(len(chunk.ids) for chunk in computed) == length - at_prefill >= 1
        assert computed[-1].start + len(computed[-1].ids) == length
        if tail or split.prefill_page == 1:
            assert [(chunk.start, chunk.ids) for chunk in computed] == [(length - 1, ids[-1:])]
        # When decode takes its first step its cache is as long as the prompt: no token short, none twice.
        steps = [chunk for step in decode.steps for chunk in step.plan.chunks]
        assert [(chunk.start, chunk.ids) for chunk in steps] == [
            (length + index, (token,)) for index, token in enumerate(answers[0].ids[:-1])
        ]
    assert len({answer.ids for answer in answers}) == 1
    assert answers[0].ids == expected(ids).ids
    assert {split.made.first_logits(answer) for answer in answers} == {expected(ids).first_logits}


# -- the router -------------------------------------------------------------------------------


async def asked_idle(made: Stack, ids: tuple[int, ...]) -> Completion:
    """Asks when the router has heard that nobody is busy: only the prefix decides then."""
    pool = made.router.pool
    await made.until(lambda: not any(pool.load(member).queued_tokens for member in pool.members()))
    return await made.ask(ids, GREEDY)


async def test_a_prompt_goes_to_the_prefill_worker_that_holds_its_prefix() -> None:
    async with stack() as made:
        for _ in range(2):
            await made.add_prefill(engine(pages=256))
        await made.add_decode(engine(pages=256))
        homes: dict[int, str] = {}
        while len(homes) < 4 or len(set(homes.values())) < 2:  # cold prompts are placed at random
            seed = len(homes)
            assert seed < 40
            homes[seed] = worker_of(await asked_idle(made, prompt(70, seed=seed)))
        for seed, home in homes.items():
            for ending in range(2):  # other ends, the same first 64 tokens
                ids = (*prompt(70, seed=seed)[:64], *prompt(9, seed=100 + 10 * seed + ending))
                got = await asked_idle(made, ids)
                assert (worker_of(got), found(got)) == (home, (64, 64))
                assert got.ids == expected(ids).ids

        # A worker that has started anew is another one, whatever its name and whatever was sent there before.
        kept = [seed for seed, home in homes.items() if home == "p1"]
        lost = [seed for seed, home in homes.items() if home == "p0"]
        await made.remove(made.prefills[0])
        await made.add_prefill(engine(pages=256), worker_id="p0")
        for seed in kept:
            got = await asked_idle(made, prompt(70, seed=seed))
            assert (worker_of(got), found(got)[0]) == ("p1", 68)  # all but the last page
        for seed in lost:
            got = await asked_idle(made, prompt(70, seed=seed))
            assert found(got)[0] == 0
            again = await asked_idle(made, prompt(70, seed=seed))
            assert (worker_of(again), found(again)[0]) == (worker_of(got), 68)


def worker_of(completion: Completion) -> str:
    assert completion.record is not None
    return completion.record.prefill_worker


# -- what was announced stays -----------------------------------------------------------------


async def test_an_announced_prefix_is_still_there_when_the_rest_arrives() -> None:
    """Between decode's announcement and its grant others take every page that can be taken."""
    async with pair(engine(pages=64), engine(pages=24)) as made:  # decode: 96 tokens
        ids = prompt(LENGTH, seed=1)
        await made.ask(ids[:32], WARM)
        prefill, decode = made.prefills[0].engine, made.decodes[0]
        assert isinstance(prefill, WatchedEngine)
        with prefill.held():
            asking = asyncio.create_task(made.ask(ids, GREEDY))
            async with asyncio.timeout(10):
                await prefill.inside.wait()
            (waiting,) = decode.pipeline.sequences
            announced = waiting.held
            assert len(announced) == 8
            decode.blocks.allocate("others", decode.blocks.available_count)  # evicts whatever can be evicted
            assert set(announced) <= set(decode.blocks.holdings()[waiting.pin])
            decode.blocks.release("others")
        got = await asking
        assert found(got) == (32, 32)
        assert got.ids == expected(ids).ids and made.first_logits(got) == expected(ids).first_logits


async def test_announced_prefixes_never_take_more_than_half_of_the_pages() -> None:
    """However many requests with a held prefix wait, others can still be granted pages."""
    async with pair(engine(pages=256), engine(pages=32)) as made:
        warm = [prompt(25, seed=seed) for seed in range(4)]
        for ids in warm:
            await made.ask(ids[:24], WARM)
        prefill, decode = made.prefills[0].engine, made.decodes[0]
        assert isinstance(prefill, WatchedEngine)
        with prefill.held():
            asking = [asyncio.create_task(made.ask(ids, GREEDY)) for ids in warm * 2]
            await made.until(lambda: len(decode.pipeline.sequences) == 8)
            ungranted = [s for s in decode.pipeline.sequences if not s.pages]
            assert 0 < len({page for s in ungranted for page in s.held}) <= decode.blocks.pages // 2
            assert any(not s.held for s in ungranted)  # the bound was reached
        for ids, got in zip(warm * 2, await asyncio.gather(*asking), strict=True):
            assert got.ids == expected(ids).ids


# -- what is not offered ------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["prompt_logprobs", "echo", "cache_salt"])
async def test_log_probabilities_of_a_prompt_are_refused_by_name_cold_and_warm(field: str) -> None:
    """Of tokens that were not computed there are none, so nobody may ask for them."""
    messages = [{"role": "user", "content": "the cat sat on the mat and the dog sat on the log"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    async with house() as served:
        url = f"http://{served.router.http_address}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=20) as http:
            for cached in (False, True):
                refused = await http.post(url, json={**body, field: 1})
                assert refused.status_code == 400
                assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("unknown_field", field)
                usage = (await http.post(url, json=body)).json()["usage"]
                assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == cached
        async with AsyncClient(served.router.address) as client:
            with pytest.raises(InvalidRequest) as caught:
                await client.complete("the", logprobs=1, **{field: True})  # type: ignore[arg-type]
            assert caught.value.field == field  # an echo alone is no log probability: of both together there would be
