"""One process against the whole service, in deterministic mode: equal ids, bit-equal first logits.

The baseline keeps pages of 4 tokens and runs prompts in chunks of 7. The service's prefill
worker keeps pages of 8, tokens outermost, and runs chunks of 16; its decode worker keeps
pages of 5, heads outermost. Prompt lengths lie around every one of these boundaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from pdserve.client.events import Completion
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.events import HandoffRecord, Usage
from tests.e2e.stack import Stack, alone, alone_on, pair
from tests.e2e.watched import WatchedEngine, engine
from tests.engine.tiny import prompt, tiny_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL_PAGE, DECODE_PAGE, CHUNK, BASE_CHUNK = 8, 5, 16, 7
LENGTHS = (
    1, 2,
    DECODE_PAGE - 1, DECODE_PAGE, DECODE_PAGE + 1,
    PREFILL_PAGE - 1, PREFILL_PAGE, PREFILL_PAGE + 1,
    CHUNK - 1, CHUNK, CHUNK + 1,
    2 * CHUNK, 2 * CHUNK + PREFILL_PAGE - 1, 2 * CHUNK + PREFILL_PAGE, PREFILL_PAGE * DECODE_PAGE + 1,
    3 * CHUNK + DECODE_PAGE - 1,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0)
SAMPLED = SamplingParams(
    seed=2**63 + 11, max_tokens=6, temperature=1.2, top_p=0.9, repetition_penalty=1.2,
    presence_penalty=0.4, frequency_penalty=0.3, logprobs=2,
)  # fmt: skip
OPTIONS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@dataclass
class Path:
    """The service, and the same model in one process."""

    made: Stack
    local: LocalRunner
    dtype: str


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fp32", "bf16", "float64"])
async def path(request: pytest.FixtureRequest) -> AsyncIterator[Path]:
    dtype = request.param
    prefill = engine(dtype=dtype, page_size=PREFILL_PAGE, axis_order="nhd")
    decode = engine(dtype=dtype, page_size=DECODE_PAGE, axis_order="hnd")
    local = LocalRunner(tiny_engine(dtype=dtype, deterministic=True, pages=128), chunk_tokens=BASE_CHUNK)
    async with pair(prefill, decode) as made:
        yield Path(made, local, dtype)


def record_of(completion: Completion) -> HandoffRecord:
    assert completion.record is not None
    return completion.record


def whole_pages(tokens: int, page_size: int) -> int:
    """Tokens of a prompt that a second request finds: whole pages, and never the last token."""
    return (tokens - 1) // page_size * page_size


@OPTIONS
@pytest.mark.parametrize("length", LENGTHS)
async def test_cold_and_warm_equal_one_process(path: Path, params: SamplingParams, length: int) -> None:
    ids = prompt(length, seed=length if params is GREEDY else 1000 + length)
    expected = alone_on(path.local, ids, params)
    cold = await path.made.ask(ids, params)
    warm = await path.made.ask(ids, params)
    for got in (cold, warm):
        assert got.ids == expected.ids
        assert path.made.first_logits(got) == expected.first_logits
        assert {d.code for d in record_of(got).conversions} == {"PAGE_SIZE", "PAGE_AXIS_ORDER"}
    assert warm.logprobs == cold.logprobs
    assert cold.usage == Usage(length, 6, 0)
    assert (record_of(cold).computed_tokens, record_of(cold).sent_tokens) == (length, length)
    # The second time both workers hold whole pages of it, each in its own page size.
    found = whole_pages(length, PREFILL_PAGE)
    assert warm.usage == Usage(length, 6, found)
    assert record_of(warm).computed_tokens == length - found
    assert record_of(warm).sent_tokens == length - whole_pages(length, DECODE_PAGE)


@OPTIONS
async def test_eight_at_once_equal_one_by_one(path: Path, params: SamplingParams) -> None:
    lengths = (1, 7, 8, 16, 17, 33, 39, 52)
    seed = 3000 if params is GREEDY else 4000
    prompts = [prompt(length, seed=seed + length) for length in lengths]
    each = [replace(params, seed=n, max_tokens=4 + n) for n in range(8)]
    expected = [alone_on(path.local, ids, options) for ids, options in zip(prompts, each, strict=True)]
    prefill, decode = path.made.prefills[0].engine, path.made.decodes[0].engine
    assert isinstance(prefill, WatchedEngine) and isinstance(decode, WatchedEngine)
    for cached in (False, True):
        prefill.steps.clear()
        decode.steps.clear()
        received = len(path.made.hosts[0].logits)
        answers = asyncio.gather(*(path.made.ask(i, o) for i, o in zip(prompts, each, strict=True)))
        with decode.held():  # until every cache has arrived
            with prefill.held():  # until every prompt is here
                await path.made.until(lambda: len(path.made.prefills[0].pipeline.jobs) == 8)
            await path.made.until(lambda: len(path.made.hosts[0].logits) == received + 8)  # noqa: B023
        for got, wanted, ids in zip(await answers, expected, prompts, strict=True):
            assert got.ids == wanted.ids
            assert path.made.first_logits(got) == wanted.first_logits
            assert got.usage.cached_prompt_tokens == (whole_pages(len(ids), PREFILL_PAGE) if cached else 0)
        # They really shared steps.
        assert max(len(step.plan.chunks) for step in prefill.steps) > 1
        assert max(len(step.plan.chunks) for step in decode.steps) == 8


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((1, "hnd"), (64, "nhd")), ((16, "nhd"), (1, "nhd")), ((4, "hnd"), (4, "nhd")), ((4, "hnd"), (4, "hnd"))],
)
async def test_every_page_layout_converts_and_is_reported(prefill: tuple[int, str], decode: tuple[int, str]) -> None:
    ids = prompt(37)
    expected = alone(ids, SAMPLED)
    engines = [engine(page_size=size, axis_order=order, pages=128) for size, order in (prefill, decode)]
    async with pair(*engines) as made:
        for _ in ("cold", "warm"):
            got = await made.ask(ids, SAMPLED)
            assert got.ids == expected.ids
            assert made.first_logits(got) == expected.first_logits
            assert {d.code: (d.left, d.right) for d in record_of(got).conversions} == {
                code: (str(left), str(right))
                for code, left, right in zip(("PAGE_SIZE", "PAGE_AXIS_ORDER"), prefill, decode, strict=True)
                if left != right
            }


async def test_one_token_carries_no_cache(path: Path) -> None:
    for length in (1, 8, 37):
        ids = prompt(length, seed=5000 + length)
        params = replace(SAMPLED, max_tokens=1)
        expected = alone_on(path.local, ids, params)
        cached = path.made.decodes[0].blocks.cached_count
        for computed in (length, length - whole_pages(length, PREFILL_PAGE)):
            got = await path.made.ask(ids, params)
            assert got.ids == expected.ids
            assert path.made.first_logits(got) == expected.first_logits
            record = record_of(got)
            assert (record.frames_sent, record.sent_tokens, record.computed_tokens) == (0, 0, computed)
            assert record.bytes_sent == len(expected.first_logits)  # the logits, and nothing else
        assert path.made.decodes[0].blocks.cached_count == cached


@OPTIONS
async def test_a_second_turn_builds_on_pages_that_decode_computed(path: Path, params: SamplingParams) -> None:
    """Decode found them itself, token by token; prefill finds only the prompt. Neither changes the answer."""
    ids = prompt(21, seed=6000 if params is GREEDY else 7000)
    first = await path.made.ask(ids, replace(params, max_tokens=16))
    longer = (*ids, *first.ids, *prompt(3, seed=1))
    expected = alone_on(path.local, longer, params)
    second = await path.made.ask(longer, params)
    assert second.ids == expected.ids
    assert path.made.first_logits(second) == expected.first_logits
    assert second.usage.cached_prompt_tokens == len(ids) // PREFILL_PAGE * PREFILL_PAGE
    # The last token of the first answer was never computed.
    held = (len(ids) + 15) // DECODE_PAGE * DECODE_PAGE
    assert held > len(ids) and record_of(second).sent_tokens == len(longer) - held
