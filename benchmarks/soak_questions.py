"""What a soak asks, and what one process answers: every question is one of a fixed number, computed beforehand.

An answer is one output for each choice. A question for an adapter that is replaced meanwhile has one answer for each
of its versions, and either is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pdserve.engine.adapter_files import load_adapter
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.local import LocalRunner
from pdserve.request import REGEX, Grammar, SamplingParams
from pdserve.rpc.events import TokenBatch
from pdserve.tokenizer import Tokenizer, load_bundle

REPLACED, TOGGLED = "red", "blue"
"""Adapters: one that is always served, in one of two versions; one that comes and goes."""

VERSIONS: Mapping[str, tuple[str, ...]] = {REPLACED: ("red-1", "red-2"), TOGGLED: ("blue-1",)}
WORDS = ("a river", "two cities", "the oldest tree", "a letter", "snow in May", "three colours", "the sea", "a clock")


@dataclass(frozen=True)
class Output:
    ids: tuple[int, ...]
    text: str


Answer = tuple[Output, ...]  # by choice


@dataclass(frozen=True)
class Question:
    kind: str
    ids: tuple[int, ...]  # the prompt, as the model reads it
    sampling: SamplingParams
    messages: tuple[Mapping[str, str], ...] = ()  # asked instead of ids, where there are any
    n: int = 1
    adapter: str = ""
    answers: tuple[Answer, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Sizes:
    """In tokens; each a range that is drawn from."""

    vocab: range
    short: range
    long: range
    output: range
    prefix: int  # that questions share
    pages: int  # of a worker: fewer than all questions need


TINY = Sizes(range(1, 250), range(8, 60), range(250, 400), range(8, 64), 96, pages=160)
SMOLLM2 = Sizes(range(1000, 40_000), range(8, 48), range(160, 300), range(6, 24), 64, pages=160)


def make(sizes: Sizes, tokenizer: Tokenizer, seed: int) -> Iterator[Question]:
    """Every kind, without answers."""
    drawn = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(drawn.choice(sizes.vocab) for _ in range(count))

    def greedy() -> SamplingParams:
        return SamplingParams(temperature=0.0, seed=0, max_tokens=drawn.choice(sizes.output), ignore_eos=True)

    def sampled() -> SamplingParams:
        wild = replace(greedy(), temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, frequency_penalty=0.4)
        return replace(wild, repetition_penalty=1.1, seed=drawn.getrandbits(32))

    short = sizes.short
    for _ in range(10):
        yield Question("plain", ids(drawn.choice(short)), greedy())
        yield Question("sampled", ids(drawn.choice(short)), sampled())
    prefixes = [ids(sizes.prefix) for _ in range(3)]
    for number in range(9):
        yield Question("shared prefix", prefixes[number % 3] + ids(drawn.choice(short)), sampled())
    for _ in range(4):
        yield Question("long", ids(drawn.choice(sizes.long)), greedy())
        yield Question("choices", ids(drawn.choice(short)), sampled(), n=3)
        yield Question("logprobs", ids(drawn.choice(short)), replace(greedy(), logprobs=2))
        yield Question(TOGGLED, ids(drawn.choice(short)), greedy(), adapter=TOGGLED)
    for _ in range(6):
        yield Question(REPLACED, ids(drawn.choice(short)), greedy(), adapter=REPLACED)
    for number, words in enumerate(WORDS):
        messages = ({"role": "user", "content": f"Tell me about {words}."},)
        prompt = tokenizer.apply_chat(messages)
        regex = Grammar(REGEX, "[a-z]{3,8}( [a-z]{2,8}){1,3}")
        sampling = replace(sampled(), ignore_eos=False, grammar=regex if number % 2 else None)
        yield Question("regex" if number % 2 else "chat", prompt, sampling, messages)
        yield Question("stop", prompt, replace(sampled(), stop=("e", "a t")), messages)


class Baseline:
    """One process with one engine, whose answers count."""

    def __init__(self, model: Path, adapters: Path, pages: int = 256) -> None:
        """`adapters`: where the directories in `VERSIONS` are. In one thread, as each worker."""
        torch.set_num_threads(1)
        bundle = load_bundle(model)
        config = EngineConfig(dtype="fp32", pages=pages, page_size=16, deterministic=True, kernels="plain")
        self._engine = Engine(load_model(model, "fp32"), config)
        self._bundle, self._adapters = bundle, adapters

    def answered(self, questions: Sequence[Question]) -> list[Question]:
        plain = [question for question in questions if not question.adapter]
        made = self._with(None, plain)
        for name, versions in VERSIONS.items():
            mine = [question for question in questions if question.adapter == name]
            answers = []
            for version in versions:
                adapter = load_adapter(self._adapters / version, self._engine.base)
                self._engine.adapters.add(adapter)
                answers.append([question.answers[0] for question in self._with(adapter.digest, mine)])
            made += [replace(question, answers=each) for question, *each in zip(mine, *answers, strict=True)]
        return made

    def _with(self, adapter: bytes | None, questions: Sequence[Question]) -> list[Question]:
        runner = LocalRunner(self._engine, self._bundle, adapter=adapter)
        single = [question for question in questions if question.n == 1]
        outputs = runner.generate_batch([each.ids for each in single], [each.sampling for each in single])
        made = [
            replace(question, answers=((Output(output.ids, _text(output.text)),),))
            for question, output in zip(single, outputs, strict=True)
        ]
        return made + [replace(each, answers=(_choices(runner, each),)) for each in questions if each.n > 1]


def _choices(runner: LocalRunner, question: Question) -> Answer:
    ids: list[tuple[int, ...]] = [()] * question.n
    text = [b""] * question.n
    for event in runner.generate(question.ids, question.sampling, n=question.n):
        if isinstance(event, TokenBatch):
            ids[event.choice] += event.ids
            text[event.choice] += event.text
    return tuple(Output(*each) for each in zip(ids, map(_text, text), strict=True))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def http_options(question: Question) -> dict[str, Any]:
    """The question's options as the OpenAI API names them."""
    asked = question.sampling
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "repetition_penalty", "seed", "ignore_eos")
    body = {name: getattr(asked, name) for name in names}
    body |= {"max_tokens": asked.max_tokens, "n": question.n, "return_token_ids": True}
    if asked.stop:
        body["stop"] = list(asked.stop)
    if asked.grammar is not None:
        body["response_format"] = {"type": "regex", "regex": asked.grammar.text}
    if asked.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": asked.logprobs} if question.messages else {"logprobs": 2}
    return body
