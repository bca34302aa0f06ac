"""The callers of a soak: each asks one question after the other, by one of three doors, and compares the answer.

    grpc     pdserve.client, as a stream
    http     OpenAI's client, a whole answer
    stream   OpenAI's client, a stream

Some streams are left early; what had come by then must be the beginning of the answer. Some requests are wrong on
purpose, and must be refused by name.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import openai
from openai import AsyncOpenAI

from benchmarks.soak_questions import TOGGLED, Answer, Output, Question, http_options
from pdserve.client import AsyncClient, Tokens
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.request import SamplingParams

DOORS = ("grpc", "grpc", "http", "stream")
LEAVES, IS_WRONG = 0.1, 0.03  # shares of all requests
TIMEOUT_S = 120.0
UNTYPED = "UNTYPED"

COMPLETE, LEFT, REFUSED, FAILED, DIFFERENT = ENDS = ("complete", "left early", "refused as due", "failed", "different")


@dataclass(frozen=True)
class Outcome:
    kind: str
    door: str
    tenant: str
    began: float
    ended: float
    end: str  # one of ENDS
    reason: str = ""  # of a failure: the stable code, or UNTYPED
    text: str = ""  # of a failure, for people
    tokens: int = 0


@dataclass(frozen=True)
class Doors:
    """One tenant's ways in."""

    tenant: str
    grpc: AsyncClient
    http: AsyncOpenAI
    model: str


class Failed(Exception):
    """A request that ended otherwise than asked for."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Callers:
    """`clients` callers that ask until told to rest. Belongs to one event loop.

    Args:
        serves: whether an adapter may be asked for now.
    """

    def __init__(
        self,
        doors: Sequence[Doors],
        questions: Sequence[Question],
        clients: int,
        think_s: float,
        seed: int,
        serves: Callable[[str], bool],
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._doors, self._clients, self._think_s, self._serves = doors, clients, think_s, serves
        self._kinds: dict[str, list[Question]] = {}
        for question in questions:
            self._kinds.setdefault(question.kind, []).append(question)
        self._seed = seed
        self._rounds = 0

    async def ask_until(self, resting: asyncio.Event) -> None:
        """Returns when the last answer is there. Every round of callers draws other questions."""
        self._rounds += 1
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                drawn = random.Random(f"{self._seed} {self._rounds} {number}")
                group.create_task(self._caller(drawn, resting))

    async def ask_each(self) -> None:
        """Every question once by every door, so that whatever is kept for a kind is there."""
        for question in (each for kind in self._kinds.values() if self._serves(kind[0].adapter) for each in kind[:2]):
            for number, door in enumerate(dict.fromkeys(DOORS)):
                await self._one(question, self._doors[number % len(self._doors)], door, None)

    async def _caller(self, drawn: random.Random, resting: asyncio.Event) -> None:
        while not resting.is_set():
            kinds = [kind for kind in self._kinds if kind != TOGGLED or self._serves(kind)]
            question = drawn.choice(self._kinds[drawn.choice(kinds)])
            doors, door = drawn.choice(self._doors), drawn.choice(DOORS)
            if drawn.random() < IS_WRONG:
                await self._wrong(doors)
            else:
                leaves = drawn.random() < LEAVES and door != "http"
                await self._one(question, doors, door, drawn.randint(1, 6) if leaves else None)
            await asyncio.sleep(drawn.expovariate(1 / self._think_s))

    async def _one(self, question: Question, doors: Doors, door: str, leave_after: int | None) -> None:
        began = time.monotonic()
        ask = {"grpc": by_grpc, "http": by_http, "stream": by_stream}[door]
        end, reason, text, tokens = COMPLETE, "", "", 0
        try:
            async with asyncio.timeout(TIMEOUT_S):
                said = await ask(doors, question, leave_after)
            tokens = sum(len(output.ids) for output in said)
            if leave_after is not None:
                end = LEFT
            if not any(fits(said, answer, leave_after is not None) for answer in question.answers):
                end, text = DIFFERENT, f"{said} is not among {question.answers}"
        except Failed as error:
            end, reason, text = FAILED, error.reason, str(error)
            if reason == "UNKNOWN_ADAPTER" and question.adapter == TOGGLED and not self._serves(TOGGLED):
                end = REFUSED
        except TimeoutError:
            end, reason, text = FAILED, UNTYPED, f"no answer within {TIMEOUT_S:g} s"
        self._note(Outcome(question.kind, door, doors.tenant, began, time.monotonic(), end, reason, text, tokens))

    async def _wrong(self, doors: Doors) -> None:
        began, end, reason = time.monotonic(), FAILED, "ACCEPTED"
        try:
            await doors.grpc.complete(token_ids=[-1], sampling=SamplingParams(max_tokens=1), timeout_s=TIMEOUT_S)
        except InvalidRequest as error:
            end, reason = REFUSED, error.reason
        except PdserveError as error:
            reason = error.reason
        self._note(Outcome("wrong", "grpc", doors.tenant, began, time.monotonic(), end, reason))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def fits(said: Answer, answer: Answer, partly: bool) -> bool:
    """Whether that was said, or is how it begins."""
    if partly:
        return len(said) <= len(answer) and all(
            ours.ids == theirs.ids[: len(ours.ids)] for ours, theirs in zip(said, answer, strict=False)
        )
    return said == answer


class _Heard:
    """What has come of each choice."""

    def __init__(self, n: int) -> None:
        self._ids: list[tuple[int, ...]] = [()] * n
        self._text = [""] * n

    def add(self, choice: int, ids: Sequence[int], text: str) -> None:
        self._ids[choice] += tuple(ids)
        self._text[choice] += text

    @property
    def answer(self) -> Answer:
        return tuple(Output(*each) for each in zip(self._ids, self._text, strict=True))


async def by_grpc(doors: Doors, question: Question, leave_after: int | None) -> Answer:
    heard, events = _Heard(question.n), 0
    options: dict[str, Any] = {"sampling": question.sampling, "n": question.n, "timeout_s": TIMEOUT_S}
    prompt = {"messages": question.messages} if question.messages else {"token_ids": question.ids}
    asked = doors.grpc.generate(model=doors.model, adapter=question.adapter, **prompt, **options)
    try:
        async with aclosing(asked) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    heard.add(event.choice, event.ids, event.text)
                    events += 1
                if leave_after is not None and events >= leave_after:
                    break
    except PdserveError as error:
        raise Failed(UNTYPED if error.reason == "INTERNAL" else error.reason, str(error)) from error
    return heard.answer


async def by_http(doors: Doors, question: Question, leave_after: int | None) -> Answer:
    heard = _Heard(question.n)
    try:
        answer = await _create(doors, question)
    except openai.OpenAIError as error:
        raise failure(error) from error
    for choice in answer.choices:
        heard.add(choice.index, *_piece(choice, "message"))
    return heard.answer


async def by_stream(doors: Doors, question: Question, leave_after: int | None) -> Answer:
    heard, events = _Heard(question.n), 0
    try:
        async with await _create(doors, question, stream=True) as stream:
            async for choice in _choices(stream):
                heard.add(choice.index, *_piece(choice, "delta"))
                events += bool((choice.model_extra or {}).get("token_ids"))
                if leave_after is not None and events >= leave_after:
                    break
    except openai.OpenAIError as error:
        raise failure(error) from error
    return heard.answer


async def _create(doors: Doors, question: Question, **more: Any) -> Any:
    model = f"{doors.model}:{question.adapter}" if question.adapter else doors.model
    body = http_options(question)
    if question.messages:
        create: Any = doors.http.chat.completions.create
        return await create(model=model, messages=list(question.messages), extra_body=body, **more)
    create = doors.http.completions.create
    return await create(model=model, prompt=list(question.ids), extra_body=body, **more)


async def _choices(stream: Any) -> AsyncIterator[Any]:
    async for chunk in stream:
        for choice in chunk.choices:
            yield choice


def _piece(choice: Any, part: str) -> tuple[Sequence[int], str]:
    """Ids and text of a completion's choice, or of a chat's `part`."""
    inner = getattr(choice, part, None)
    text = choice.text if inner is None else inner.content
    return (choice.model_extra or {}).get("token_ids") or (), text or ""


def failure(error: openai.OpenAIError) -> Failed:
    """By its stable code, which every error of ours has, in a status and in a stream."""
    code = str(getattr(error, "code", None) or UNTYPED).upper()
    return Failed(UNTYPED if code == "INTERNAL" else code, str(error))
