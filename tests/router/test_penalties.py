"""What penalties count, by their formulas on raw logits: the first token once, the prompt where it belongs, and that
cold, warm and handed off alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pdserve.engine.engine import Engine
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from tests.router.support import ENGINE, finish_of, house, ids_of, model

PROMPT = tuple((7 * n + 3) % 300 for n in range(21))
PENALTIES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.9},
    "all": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
}


def expected(params: SamplingParams) -> tuple[int, ...]:
    """Greedy choices by the formulas, on the logits that one process computes along them."""
    found: list[int] = []

    def check(_: int, index: int, logits: Tensor) -> None:
        scores = logits.double().numpy().copy()
        for token in {*PROMPT, *found}:  # Keskar et al.: over prompt and output
            r = params.repetition_penalty
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
        for token in set(found):  # OpenAI: over the output alone
            scores[token] -= params.presence_penalty + params.frequency_penalty * found.count(token)
        assert index == len(found)
        found.append(int(np.argmax(scores)))

    runner = LocalRunner(Engine(model(), ENGINE))
    output = list(runner.generate(PROMPT, params, observe=check))
    assert output
    return tuple(found)


@pytest.mark.parametrize("name", PENALTIES)
async def test_penalties_count_each_token_once_cold_warm_and_handed_off(name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0, **PENALTIES[name])
    wanted = expected(params)
    options = {"max_tokens": 12, "ignore_eos": True, **PENALTIES[name]}
    async with house() as made:
        for turn in ("cold", "warm"):
            events = await made.generate(PROMPT, **options)
            assert ids_of(events) == wanted, turn
            assert finish_of(events).usage.prompt_tokens == len(PROMPT)
        assert finish_of(events).usage.cached_prompt_tokens == 20  # so the second was warm


async def test_a_wrong_count_would_show() -> None:
    """The penalties here change the output from the second token on, and doubling or forgetting one does so again."""
    plain = expected(SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0))
    once = expected(SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0, frequency_penalty=2.0))
    assert plain[0] == once[0] and plain != once
