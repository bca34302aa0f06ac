"""Answers that begin at a decode worker which breaks off, and how they go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pdserve.engine.engine import Engine
from pdserve.local import LocalRunner
from pdserve.registry.records import DECODE
from pdserve.request import SamplingParams
from tests.router.orchestrated import IDS
from tests.router.peers import BadDecode, serving
from tests.router.support import ENGINE, House, bundle, house, model


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
