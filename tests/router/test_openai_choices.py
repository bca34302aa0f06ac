"""`n` through OpenAI's official client, and the same in the gRPC gateway: against what one process draws."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pdserve.client import AsyncClient
from pdserve.engine.engine import Engine
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from pdserve.tokenizer import Tokenizer
from tests.router.support import ENGINE, MODEL, House, bundle, model

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["the cat sat", "a dog, naïvely €5", "the log"]
MESSAGES: Any = [{"role": "user", "content": "the cat"}]
DRAWN: dict[str, Any] = {"model": MODEL, "temperature": 0.9, "seed": 4, "max_tokens": 10}
IGNORE: dict[str, Any] = {"ignore_eos": True}
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def runner() -> LocalRunner:
    return LocalRunner(Engine(model(), replace(ENGINE, kernels="plain")), bundle())


def drawn(runner: LocalRunner, ids: tuple[int, ...], n: int, params: SamplingParams = PARAMS) -> list[str]:
    """The texts of one process that computes the prompt for each choice."""
    texts = [b""] * n
    for event in runner.generate(ids, params, n=n):
        if isinstance(event, TokenBatch):
            texts[event.choice] += event.text
        else:
            assert isinstance(event, Finish)
    return [text.decode("utf-8", "replace") for text in texts]


async def test_three_prompts_with_two_choices_each_are_six_prompt_major(
    client: AsyncOpenAI, runner: LocalRunner
) -> None:
    tokenizer = Tokenizer(bundle())
    wanted = [text for prompt in TEXTS for text in drawn(runner, tokenizer.encode(prompt), 2)]
    answer = await client.completions.create(**DRAWN, prompt=TEXTS, n=2, best_of=2, extra_body=IGNORE)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == wanted and len(set(wanted)) == 6
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in TEXTS)  # once each
    assert answer.usage.completion_tokens == 60
    stream = await client.completions.create(
        **DRAWN, prompt=TEXTS, n=2, stream=True, stream_options={"include_usage": True}, extra_body=IGNORE
    )
    texts, ends, last = [""] * 6, [0] * 6, None
    async for chunk in stream:
        assert last is None  # nothing follows the usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
        last = chunk.usage
    assert (texts, ends) == (wanted, [1] * 6)
    assert last is not None and (last.prompt_tokens, last.completion_tokens) == (answer.usage.prompt_tokens, 60)


async def test_echo_comes_before_each_choice(client: AsyncOpenAI, runner: LocalRunner) -> None:
    answer = await client.completions.create(**DRAWN, prompt=TEXTS[:2], n=3, echo=True, extra_body=IGNORE)
    tokenizer = Tokenizer(bundle())
    wanted = [prompt + text for prompt in TEXTS[:2] for text in drawn(runner, tokenizer.encode(prompt), 3)]
    assert [choice.text for choice in answer.choices] == wanted


async def test_chat_with_several_choices_whole_and_streamed(client: AsyncOpenAI, runner: LocalRunner) -> None:
    ids = Tokenizer(bundle()).apply_chat(MESSAGES)
    wanted = drawn(runner, ids, 4)
    whole = await client.chat.completions.create(
        **DRAWN, messages=MESSAGES, n=4, logprobs=True, extra_body={**IGNORE, "pdserve_record": True}
    )
    assert [choice.message.content for choice in whole.choices] == wanted
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [len(choice.logprobs.content or ()) for choice in whole.choices if choice.logprobs] == [10] * 4
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 40)
    record = whole.model_extra["pdserve_record"] if whole.model_extra else {}
    assert (record["choices"], record["prefills"], record["transfers"]) == (4, 1, 1)
    texts, ends = [""] * 4, [0] * 4
    async for chunk in await client.chat.completions.create(
        **DRAWN, messages=MESSAGES, n=4, stream=True, extra_body=IGNORE
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
    assert (texts, ends) == (wanted, [1] * 4)


async def test_choices_end_each_with_its_own_reason(client: AsyncOpenAI, runner: LocalRunner) -> None:
    tokenizer = Tokenizer(bundle())
    free = drawn(runner, tokenizer.encode(TEXTS[0]), 3)
    pieces = (free[1][n : n + 2] for n in range(len(free[1]) - 1))
    stop = next(piece for piece in pieces if piece.isascii() and piece not in free[0] + free[2])
    answer = await client.completions.create(**DRAWN, prompt=TEXTS[0], n=3, stop=[stop], extra_body=IGNORE)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop", "length"]
    assert [choice.text for choice in answer.choices] == [free[0], free[1].split(stop)[0], free[2]]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"best_of": 3, "n": 2}, "best_of", "invalid_field"),
        ({"best_of": 2}, "best_of", "invalid_field"),
        ({"prompt": TEXTS, "n": 43}, "n", "too_many_choices"),
        ({"n": 0}, "n", "invalid_n"),
        ({"n": 129, "prompt": "a"}, "n", "too_many_choices"),
        ({"n": -1}, "n", "invalid_n"),
        ({"n": "2"}, "n", "invalid_field"),
    ],
    ids=str,
)
async def test_a_number_of_choices_that_cannot_be_is_refused_by_name(
    client: AsyncOpenAI, change: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(**({**DRAWN, "prompt": "the", "extra_body": IGNORE} | change))
    assert (refused.value.param, refused.value.code) == (param, code)


async def test_the_gateway_and_the_synchronous_client_give_the_same_choices(made: House, runner: LocalRunner) -> None:
    ids = Tokenizer(bundle()).encode(TEXTS[1])
    wanted = drawn(runner, ids, 3)
    async with AsyncClient(made.router.address) as grpc_client:
        answer = await grpc_client.complete(TEXTS[1], sampling=PARAMS, n=3, want_record=True)
    assert [choice.text for choice in answer.choices] == wanted and answer.text == wanted[0]
    assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (len(ids), 30)
    assert answer.record is not None and answer.record.choices == 3

    def ask() -> list[str]:
        with OpenAI(base_url=f"http://{made.router.http_address}/v1", api_key="none", max_retries=0) as plain:
            made_there = plain.completions.create(**DRAWN, prompt=TEXTS[1], n=3, extra_body=IGNORE)
            return [choice.text for choice in made_there.choices]

    assert await asyncio.to_thread(ask) == wanted
