"""A long queue at prefill costs decode no page, and every request of it is answered in the end."""

from __future__ import annotations

import asyncio
from collections import Counter

from pdserve.request import SamplingParams
from tests.e2e.stack import Stack, alone, stack
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import prompt

PARAMS = SamplingParams(temperature=0, max_tokens=8, seed=0)
REQUESTS = 12


def kinds(made: Stack) -> Counter[str]:
    accounts = made.decodes[0].accounts()
    assert accounts.fault == ""
    return Counter(holding.kind for holding in accounts.holdings)


async def test_only_what_prefill_computes_has_pages_at_decode() -> None:
    prefill = engine()
    async with stack() as made:
        await made.add_prefill(prefill, max_running=1)
        decode = await made.add_decode(engine(pages=24))
        prompts = [prompt(20, seed=n) for n in range(REQUESTS)]
        with prefill.held():
            asking = [asyncio.create_task(made.ask(ids, PARAMS)) for ids in prompts]
            async with asyncio.timeout(WAIT_S):
                await prefill.inside.wait()  # the first one computes, the others queue
            await made.until(lambda: len(made.prefills[0].pipeline.scheduler.waiting) == REQUESTS - 1)
            await made.until(lambda: kinds(made) == {"grant": 1, "ticket": REQUESTS - 1})
            assert decode.blocks.held_count == 6  # 20 tokens and the first growth, in pages of four
        for ids, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
            assert answer.ids == alone(ids, PARAMS).ids


async def test_with_prefixes_that_are_here_the_queue_holds_half_of_the_pool_at_most() -> None:
    prefill = engine()
    async with stack() as made:
        await made.add_prefill(prefill, max_running=1)
        decode = await made.add_decode(engine(pages=24))
        known = [prompt(20, seed=n) for n in range(2)]
        for ids in known:
            await made.ask(ids, PARAMS)
        await made.check_free()
        prompts = [(*known[n % 2], *prompt(3, seed=90 + n)) for n in range(REQUESTS)]  # five pages of each are here
        with prefill.held():
            asking = [asyncio.create_task(made.ask(ids, PARAMS)) for ids in prompts]
            async with asyncio.timeout(WAIT_S):
                await prefill.inside.wait()
            await made.until(lambda: len(made.prefills[0].pipeline.scheduler.waiting) == REQUESTS - 1)
            await made.until(lambda: kinds(made)["grant"] == 1)
            assert kinds(made)["ticket"] == REQUESTS - 1
            pins = [h.pages for h in decode.accounts().holdings if h.kind == "pin"]
            # Two prefixes of five pages, however many share them; and one page for the grant's own tokens.
            assert pins == [5] * REQUESTS and decode.blocks.held_count == 2 * 5 + 1
        for ids, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
            assert answer.ids == alone(ids, PARAMS).ids
