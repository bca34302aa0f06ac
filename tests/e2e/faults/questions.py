"""What the matrix asks, and what one process answers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from tests.engine.tiny import prompt, tiny_engine

PROMPT, OUTPUT = 44, 40  # tokens
QUESTIONS, PROBES = 16, 8

# What is sampled depends on all that was sampled before: an answer that goes on at a wrong place shows.
SAMPLING = SamplingParams(temperature=0.9, frequency_penalty=0.4, seed=5, max_tokens=OUTPUT)
OUTPUT_LONG = 120  # tokens of a companion's answer; a cell seldom waits for all of them
LONG = replace(SAMPLING, max_tokens=OUTPUT_LONG)
COMPANION = prompt(20, seed=99)


def question(number: int) -> tuple[int, ...]:
    """What a cell asks; neighbours ask different things, so that no token of one passes in the other."""
    return prompt(PROMPT, seed=100 + number % QUESTIONS)


def probe(number: int) -> tuple[int, ...]:
    """Too short for the router to prefer a worker that has seen it."""
    return prompt(20, seed=1000 + number % PROBES)


@lru_cache(maxsize=1)
def answers() -> dict[tuple[int, ...], tuple[int, ...]]:
    """What one process says to every question and probe."""
    asked = [*map(question, range(QUESTIONS)), *map(probe, range(PROBES)), COMPANION]
    torch.set_num_threads(1)
    runner = LocalRunner(tiny_engine(pages=512, deterministic=True))
    outputs = runner.generate_batch(asked, [SAMPLING] * (QUESTIONS + PROBES) + [LONG])
    return {ids: output.ids for ids, output in zip(asked, outputs, strict=True)}
