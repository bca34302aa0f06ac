"""A request straight to the orchestrator of a house."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PdserveError
from pdserve.request import SamplingParams
from router.backlog import Event
from router.request import Ask, Request, TokenPrompt
from tests.engine.tiny import prompt
from tests.router.support import VOCAB, House

IDS = prompt(50, seed=3, vocab=VOCAB)


async def request_of(
    made: House, ids: tuple[int, ...] = IDS, timeout_s: float | None = None, **sampling: Any
) -> Request:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | sampling))
    return await made.router.intake.take(Ask(TokenPrompt(ids), params, want_record=True, timeout_s=timeout_s))


async def failure_of(made: House, **options: Any) -> tuple[list[Event], PdserveError]:
    """What a failing request delivered before its error, and the error."""
    events: list[Event] = []
    with pytest.raises(PdserveError) as caught:
        async for event in made.router.orchestrator.generate(await request_of(made, **options)):
            events.append(event)
    return events, caught.value
