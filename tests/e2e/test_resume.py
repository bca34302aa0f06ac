"""A decode worker lost in the middle of an answer: the client sees one answer, the one it would have had.

A decode engine that stops before a chosen step has given an exact number of tokens when it is
lost. Deterministic mode, so everything is compared bit by bit with one undisturbed process.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pdserve.request import REGEX, Grammar, SamplingParams
from pdserve.rpc.events import LENGTH, STOP
from tests.e2e.resuming import FIRST_SPECIAL, SPECIAL, alone, check, lose, scene
from tests.e2e.watched import WAIT_S

PLAIN = SamplingParams(temperature=0, seed=0, max_tokens=16)
SAMPLED = SamplingParams(
    temperature=1.1, seed=2**63 + 5, top_p=0.95, top_k=40, max_tokens=16, logprobs=3,
    presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.3,
)  # fmt: skip
# A used token is as good as forbidden, so the biases alone decide: first the special bytes, in order.
SPELLED = SamplingParams(
    temperature=0, seed=0, max_tokens=16, repetition_penalty=1e6,
    logit_bias={FIRST_SPECIAL + n: 100.0 - 5 * n for n in range(len(SPECIAL.encode()))},
)  # fmt: skip
FREE = alone(replace(SAMPLED, logprobs=None))
MIDDLE = FREE.text[4:9].decode()  # of the tokens 4 to 8: an answer cut at 5 to 8 is cut in the middle of it
END = FREE.ids[10]
CASES = {
    "plain": PLAIN,
    "sampled": SAMPLED,
    "stop": replace(SAMPLED, stop=("~~never", MIDDLE)),
    # Held back for four tokens, and then no stop string.
    "nearly": replace(SAMPLED, stop=(MIDDLE[:4] + "~",)),
    "end-id": replace(SAMPLED, stop_token_ids=(END,), min_tokens=8),
    "spelled": SPELLED,
    "grammar": replace(SAMPLED, grammar=Grammar(REGEX, f"([a-m]{{2}}[{SPECIAL}]?){{9}}[0-9]")),
}
EXPECTED = {name: alone(params) for name, params in CASES.items()}


def points(name: str) -> tuple[int, ...]:
    """After how many tokens an answer is cut: early, in the middle, before its last token; between all bytes."""
    last = len(EXPECTED[name].ids) - 1
    if name == "spelled":
        return tuple(range(1, len(SPECIAL.encode()) + 1))
    return tuple(sorted({1, 2, 5, 7, last}))


@pytest.mark.parametrize("name", CASES)
async def test_the_answer_is_the_uninterrupted_one(name: str) -> None:
    async with scene() as it:
        for tokens in points(name):
            async with it.stopped(CASES[name], tokens) as (task, worker, stopping):
                lose(worker)
                stopping.let_go()
                async with asyncio.timeout(WAIT_S):
                    answer = await task
            check(answer, EXPECTED[name])
            assert answer.record is not None and answer.record.attempts == 2
            assert answer.record.decode_worker != worker.worker_id


def test_the_cases_are_what_they_are_meant_to_be() -> None:
    assert EXPECTED["spelled"].text.decode().startswith(SPECIAL)
    stopped, nearly, ended = (EXPECTED[name] for name in ("stop", "nearly", "end-id"))
    assert (stopped.finish.reason, stopped.finish.stop_string, len(stopped.ids)) == (STOP, MIDDLE, 9)
    assert nearly.finish.reason == LENGTH and MIDDLE[:4].encode() in nearly.text
    assert (ended.finish.reason, ended.finish.stop_token_id, len(ended.ids)) == (STOP, END, 11)
    greedy: Any = EXPECTED["plain"]
    assert len(set(greedy.ids)) > 2
