"""Answers that lose their decode worker at a chosen token: engines that stop there, and what one process answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from decode_worker.sequence import State
from decode_worker.worker import DecodeWorker
from pdserve.client.events import Completion, Event, Tokens, collect
from pdserve.engine.plan import EngineConfig, StepOutput, StepPlan
from pdserve.errors import Unavailable
from pdserve.local import LocalOutput, LocalRunner
from pdserve.request import SamplingParams
from pdserve.tokenizer import Bundle
from tests.e2e.stack import Stack, stack
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.engine.tiny import prompt, tiny_engine, tiny_model

# The bytes of these characters are all different, and each is a token of its own.
SPECIAL = "😀世界é"
FIRST_SPECIAL = 85
IDS = prompt(30, seed=5, vocab=FIRST_SPECIAL)


def letters() -> list[str]:
    """The letter that stands for each byte in a byte-level tokenizer."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def bundle() -> Bundle:
    """85 ASCII characters from ! on, then the special bytes: one token each, as many as the tiny model has."""
    every = letters()
    known = [every[byte] for byte in (*range(0x21, 0x21 + FIRST_SPECIAL), *SPECIAL.encode())]
    backend = Backend(models.BPE(vocab={letter: n for n, letter in enumerate(known)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Bundle(tokenizer_json=backend.to_str(), vocab_size=len(known))


BUNDLE = bundle()


def alone(params: SamplingParams, ids: Sequence[int] = IDS) -> LocalOutput:
    """What one process answers that nothing happens to."""
    torch.set_num_threads(1)  # more only wait for each other here
    runner = LocalRunner(tiny_engine(deterministic=True, pages=256), BUNDLE, chunk_tokens=7)
    (output,) = runner.generate_batch([ids], params)
    return output


class Stopping(WatchedEngine):
    """Stands still inside a chosen step, until it is let go."""

    def __init__(self, page_size: int = 4, deterministic: bool = True, pages: int = 128) -> None:
        config = EngineConfig(dtype="fp32", pages=pages, page_size=page_size, deterministic=deterministic)
        super().__init__(tiny_model(), config)
        self._left = -1

    def stop_at(self, tokens: int) -> None:
        """An output begun now has `tokens` tokens, and no more, while the engine stands still."""
        self.inside.clear()
        self._left = tokens - 1  # the first token needs no step of this engine

    def step(self, plan: StepPlan, **options: Any) -> StepOutput:
        if self._left == 0:
            self._open.clear()
        self._left -= 1
        return super().step(plan, **options)

    def let_go(self) -> None:
        self._left = -1
        super().let_go()


@dataclass
class Scene:
    """One prefill worker and two decode workers, of which the one that gets a request can be lost."""

    made: Stack
    bundle: Bundle
    engines: list[Stopping] = field(default_factory=list)

    async def add_decode(self, worker_id: str, pages: int = 128) -> None:
        """One more to go on at."""
        self.engines.append(Stopping(pages=pages))
        await self.made.add_decode(self.engines[-1], bundle=self.bundle, worker_id=worker_id)

    @asynccontextmanager
    async def stopped(
        self, params: SamplingParams, tokens: int, reader: Reader | None = None
    ) -> AsyncIterator[tuple[asyncio.Task[Completion], DecodeWorker, Stopping]]:
        """A request whose decode worker stands still after `tokens` tokens, all of which its client has."""
        for each in self.engines:
            each.stop_at(tokens)
        reader = reader or Reader(self.made, IDS, params)
        task = asyncio.create_task(reader.read())
        inside = [asyncio.create_task(each.inside.wait()) for each in self.engines]
        try:
            await asyncio.wait(inside, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            (at,) = [n for n, waiting in enumerate(inside) if waiting.done()]
            for n, each in enumerate(self.engines):
                if n != at:
                    each.let_go()
            await self.made.until(lambda: reader.has(tokens))
            yield task, self.made.decodes[at], self.engines[at]
        finally:
            for each in self.engines:
                each.let_go()
            for waiting in (task, *inside):
                waiting.cancel()
            await asyncio.gather(task, *inside, return_exceptions=True)


@dataclass
class Reader:
    """A client that reads on and on."""

    made: Stack
    prompt: Sequence[int]
    params: SamplingParams
    events: list[Event] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events if isinstance(event, Tokens) for token in event.ids)

    def has(self, tokens: int) -> bool:
        return len(self.ids) == tokens

    async def read(self) -> Completion:
        asked = self.made.client.generate(token_ids=self.prompt, sampling=self.params, want_record=True, timeout_s=60.0)
        async with aclosing(asked) as events:
            async for event in events:
                self.events.append(event)
        return collect(self.events)


@asynccontextmanager
async def scene(
    prefills: int = 1, decodes: int = 2, chat: bool = False, deterministic: bool = True, **settings: Any
) -> AsyncIterator[Scene]:
    """`chat`: the tokenizer has a chat template, which writes down what was said."""
    served = replace(BUNDLE, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}") if chat else BUNDLE
    async with stack(**settings) as made:
        for _ in range(prefills):
            await made.add_prefill(engine(deterministic=deterministic), bundle=served)
        engines = [Stopping(4 + n, deterministic) for n in range(decodes)]
        for each in engines:
            await made.add_decode(each, bundle=served)
        yield Scene(made, served, engines)


def lose(worker: DecodeWorker) -> None:
    """The worker ends what it has, and lives on: the least there is to losing an answer."""
    for sequence in worker.pipeline.sequences:
        worker.pipeline.end(sequence, State.ABORTED, Unavailable("ended by the test", reason="ENDED"))


async def cut_off(worker: DecodeWorker) -> None:
    """Nobody reaches it any more; it does not say goodbye."""
    await worker._server.stop(0.0)
    await worker._transfer.stop(0.0)


def check(answer: Completion, expected: LocalOutput) -> None:
    """Nothing lost, repeated or altered, and counted once."""
    assert answer.ids == expected.ids
    assert answer.text == expected.text.decode(errors="replace")
    assert answer.logprobs == expected.tokens.logprobs
    wanted = expected.finish
    assert (answer.finish.reason, answer.finish.stop_string, answer.finish.stop_token_id) == (
        wanted.reason,
        wanted.stop_string,
        wanted.stop_token_id,
    )
    assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (len(IDS), len(expected.ids))
