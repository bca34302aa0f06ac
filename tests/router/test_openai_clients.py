"""Every option of the issue's list through OpenAI's clients: synchronous and asynchronous, whole and streamed.

A row says what has to hold for the answer: for each client, whole and streamed, and both clients get the same.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from pdserve.tokenizer import Tokenizer
from tests.router.support import MODEL, bundle

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "the cat sat on the mat"
PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": TEXT},
    "chat": {"messages": [{"role": "user", "content": TEXT}]},
}
Z, Y, X = (Tokenizer(bundle()).encode(letter)[0] for letter in "ZYX")
ONLY_Z = {str(Z): 100}
Z_OR_Y = {str(Z): 100, str(Y): 100}
# Of an object: that it closes, above all.
WANTS_AN_END = {
    str(Tokenizer(bundle()).encode(mark)[0]): bias for mark, bias in zip('}":{', (100, 90, 80, 70), strict=True)
}


@dataclass(frozen=True)
class Told:
    """An answer, however it came."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    tokens: int
    cached: int
    prompt: int


Holds = Callable[[Told], object]


def says(text: str, reason: str = "length") -> Holds:
    return lambda told: (told.texts, told.reasons) == ((text,), (reason,))


# Options; those of ours, which OpenAI's client takes in extra_body; and what has to hold.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], Holds]] = {
    "logit_bias and max_tokens": ({"logit_bias": ONLY_Z, "max_tokens": 5}, {}, says("ZZZZZ")),
    "a bias against": ({"logit_bias": {**Z_OR_Y, str(Z): -100}, "max_tokens": 3}, {}, says("YYY")),
    "stop": ({"logit_bias": ONLY_Z, "stop": "ZZZ", "max_tokens": 9}, {}, says("", "stop")),
    "stop among several": ({"logit_bias": ONLY_Z, "stop": ["no", "Z"], "max_tokens": 9}, {}, says("", "stop")),
    "stop_token_ids": ({"logit_bias": ONLY_Z, "max_tokens": 9}, {"stop_token_ids": [X, Z]}, says("", "stop")),
    "min_tokens": (
        {"logit_bias": {str(Z): 100, str(Y): 50}, "max_tokens": 9},
        {"stop_token_ids": [Z], "min_tokens": 3},
        says("YYY", "stop"),
    ),
    "repetition_penalty": (
        {"logit_bias": {str(Z): 100, str(Y): 50, str(X): 30}, "max_tokens": 3},
        {"repetition_penalty": 1000.0},
        says("ZYX"),
    ),
    "presence_penalty": (
        {"logit_bias": Z_OR_Y, "presence_penalty": 2, "max_tokens": 2}, {}, lambda told: set(*told.texts) == {"Z", "Y"},
    ),
    "frequency_penalty": (
        {"logit_bias": Z_OR_Y, "frequency_penalty": 2, "max_tokens": 8},
        {},
        lambda told: told.texts[0].count("Z") == told.texts[0].count("Y") == 4,
    ),
    "n": (
        {"logit_bias": ONLY_Z, "n": 3, "max_tokens": 2}, {}, lambda told: (told.texts, told.tokens) == (("ZZ",) * 3, 6),
    ),
    "json_object": (
        {"max_tokens": 60, "logit_bias": WANTS_AN_END},
        {"response_format": {"type": "json_object"}},
        lambda told: told.reasons == ("stop",) and isinstance(json.loads(told.texts[0]), dict),
    ),
    "json_schema": (
        {"max_tokens": 60},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [41, 42]}}}},
        lambda told: told.texts[0] in ("41", "42") and told.reasons == ("stop",),
    ),
    "a regular expression": (
        {"max_tokens": 9}, {"structured_outputs": {"regex": "[ab]{4}"}},
        lambda told: re.fullmatch("[ab]{4}", told.texts[0]) and told.reasons == ("stop",),
    ),
    "a grammar": (
        {"max_tokens": 9}, {"structured_outputs": {"grammar": 'start: "on" | "off"'}},
        lambda told: told.texts[0] in ("on", "off") and told.reasons == ("stop",),
    ),
    "include_usage with cached tokens": (
        {"max_tokens": 2}, {}, lambda told: told.tokens == 2 and told.cached == (told.prompt - 1) // 4 * 4 > 0,
    ),
}  # fmt: skip


def whole(answer: Any) -> Told:
    texts = [c.text if hasattr(c, "text") else c.message.content or "" for c in answer.choices]
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    reasons = tuple(choice.finish_reason for choice in answer.choices)
    return Told(tuple(texts), reasons, usage.completion_tokens, cached, usage.prompt_tokens)


class Adding:
    """Adds up a stream's chunks."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, str] = {}
        self._usage: Any = None

    def add(self, chunk: Any) -> None:
        assert self._usage is None  # it comes last
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            self._texts[choice.index] = self._texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                assert choice.index not in self._reasons
                self._reasons[choice.index] = choice.finish_reason
        self._usage = chunk.usage

    def told(self) -> Told:
        usage = self._usage
        texts, reasons = (tuple(kept[n] for n in sorted(kept)) for kept in (self._texts, self._reasons))
        cached = usage.prompt_tokens_details.cached_tokens
        return Told(texts, reasons, usage.completion_tokens, cached, usage.prompt_tokens)


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def asked_synchronously(url: str, body: dict[str, Any]) -> tuple[Told, Told]:
    """A completion, whole; a chat, streamed."""
    adding = Adding()
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        completion = whole(client.completions.create(**PROMPTS["completions"], **body))
        for chunk in client.chat.completions.create(**PROMPTS["chat"], **body, **STREAMED):
            adding.add(chunk)
    return completion, adding.told()


async def asked(client: AsyncOpenAI, body: dict[str, Any]) -> tuple[Told, Told]:
    """A completion, streamed; a chat, whole."""
    adding = Adding()
    async for chunk in await client.completions.create(**PROMPTS["completions"], **body, **STREAMED):
        adding.add(chunk)
    return adding.told(), whole(await client.chat.completions.create(**PROMPTS["chat"], **body))


@pytest.mark.parametrize("row", ROWS)
async def test_every_way_to_ask_gives_what_the_option_means(client: AsyncOpenAI, row: str) -> None:
    options, extra, holds = ROWS[row]
    body = {"model": MODEL, "temperature": 0, **options, "extra_body": extra}
    if "cached" in row:  # what was asked before is kept
        await asked(client, body)
    answers = await asked(client, body), await asyncio.to_thread(asked_synchronously, str(client.base_url), body)
    for told in (*answers[0], *answers[1]):
        assert holds(told), told
    for one, other in zip(*answers, strict=True):
        assert (one.texts, one.reasons, one.tokens) == (other.texts, other.reasons, other.tokens)


NEAR_GREEDY: list[dict[str, Any]] = [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}, {"temperature": 1e-6}]


@pytest.mark.parametrize("kind", PROMPTS)
async def test_filters_that_leave_the_best_token_give_the_greedy_answer(http: httpx.AsyncClient, kind: str) -> None:
    url = "/v1/completions" if kind == "completions" else "/v1/chat/completions"

    async def ids(**options: Any) -> list[int]:
        body = {"model": MODEL, **PROMPTS[kind], "max_tokens": 12, "seed": 8, "return_token_ids": True, **options}
        answer: list[int] = (await http.post(url, json=body)).json()["choices"][0]["token_ids"]
        return answer

    greedy, free = await ids(temperature=0), await ids(temperature=1.5)
    assert free != greedy
    for options in NEAR_GREEDY:
        assert await ids(**({"temperature": 1.5} | options)) == greedy, options


async def test_log_probabilities_of_a_stream_are_those_of_the_whole(client: AsyncOpenAI) -> None:
    """The four lists of a completion, and the entries of a chat, one for each token in either way."""
    body: Any = {"model": MODEL, "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    given = (await client.completions.create(**PROMPTS["completions"], **body, logprobs=2)).choices[0].logprobs
    assert given is not None and given.token_logprobs is not None and given.text_offset is not None
    kept: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    async for piece in await client.completions.create(**PROMPTS["completions"], **body, logprobs=2, stream=True):
        for name, values in kept.items():
            values += getattr(piece.choices[0].logprobs, name, None) or []
    assert (kept["tokens"], kept["text_offset"]) == (given.tokens, given.text_offset) and len(kept["tokens"]) == 8
    assert kept["token_logprobs"] == pytest.approx(given.token_logprobs, abs=1e-4)
    assert [set(top) for top in kept["top_logprobs"]] == [set(top) for top in given.top_logprobs or []]

    options: Any = {**PROMPTS["chat"], **body, "logprobs": True, "top_logprobs": 2}
    told = (await client.chat.completions.create(**options)).choices[0].logprobs
    assert told is not None and told.content is not None
    entries: list[Any] = []
    async for chunk in await client.chat.completions.create(**options, stream=True):
        logprobs = chunk.choices[0].logprobs
        entries += (logprobs.content or []) if logprobs is not None else []
    assert [entry.token for entry in entries] == [entry.token for entry in told.content] and len(entries) == 8
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in told.content], abs=1e-4)
    assert {len(entry.top_logprobs) for entry in entries} == {2}
