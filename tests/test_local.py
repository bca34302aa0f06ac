"""The one-process runner against the engine used directly, and its stop rules and accounts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.errors import InvalidRequest
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.events import LENGTH, STOP, Finish, TokenBatch, Usage
from tests.engine.tiny import SEVEN as SEVEN_SPEC
from tests.engine.tiny import greedy, prompt, seven_model, spec, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SEEDED = SamplingParams(seed=5, max_tokens=8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3)


def runner(**config: Any) -> LocalRunner:
    torch.set_num_threads(1)
    return LocalRunner(tiny_engine(**{"deterministic": True, **config}), chunk_tokens=7)


def check_empty(local: LocalRunner) -> None:
    local.blocks.check_integrity()
    assert local.blocks.held_count == 0


def test_greedy_equals_the_engine() -> None:
    local, ids = runner(), prompt(23)
    expected, logits, _ = greedy(tiny_engine(deterministic=True), ids, range(20), 8)
    seen: list[torch.Tensor] = []
    events = list(local.generate(ids, GREEDY, observe=lambda number, index, row: seen.append(row)))
    assert [e.ids for e in events[:-1] if isinstance(e, TokenBatch)] == [(i,) for i in expected]
    assert events[-1] == Finish(LENGTH, Usage(23, 8, 0))
    for got, wanted in zip(seen, logits, strict=True):
        assert torch.equal(got, wanted)
    check_empty(local)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_batch_equals_one_by_one(params: SamplingParams) -> None:
    local = runner()
    prompts = [prompt(length, seed=length) for length in (1, 3, 4, 5, 8, 17, 30)]
    each = [replace(params, seed=n, max_tokens=3 + n) for n in range(len(prompts))]
    together = local.generate_batch(prompts, each)
    for output, ids, options in zip(together, prompts, each, strict=True):
        alone = local.generate_batch([ids], options)[0]
        assert output == alone and len(output.ids) == options.max_tokens
    check_empty(local)


def test_more_prompts_than_pages_wait_for_their_turn() -> None:
    local = runner(pages=8)
    prompts = [prompt(9, seed=n) for n in range(6)]
    outputs = local.generate_batch(prompts, GREEDY)
    wide = runner().generate_batch(prompts, GREEDY)
    assert outputs == wide
    check_empty(local)


def test_an_end_id_stops_and_is_counted() -> None:
    free = runner().generate_batch([prompt(12)], GREEDY)[0].ids
    end = free[2]
    first = free.index(end)
    local = LocalRunner(tiny_engine(spec(eos_ids=(end,)), deterministic=True))
    stopped = local.generate_batch([prompt(12)], GREEDY)[0]
    assert stopped.ids == free[: first + 1]
    assert stopped.finish == Finish(STOP, Usage(12, first + 1, 0), stop_token_id=end)
    ignored = local.generate_batch([prompt(12)], replace(GREEDY, ignore_eos=True))[0]
    assert ignored.ids == free and ignored.finish.reason == LENGTH
    longer = local.generate_batch([prompt(12)], replace(GREEDY, min_tokens=6))[0]
    assert end not in longer.ids[:6] and len(longer.ids) >= 6
    by_id = runner().generate_batch([prompt(12)], replace(GREEDY, stop_token_ids=(end,)))[0]
    assert by_id.ids == stopped.ids
    check_empty(local)


def test_the_seven_decoder_answers_as_specified() -> None:
    from pdserve.engine.engine import Engine
    from pdserve.engine.plan import EngineConfig

    local = LocalRunner(Engine(seven_model(), EngineConfig(dtype="float64", pages=8, page_size=4)))
    output = local.generate_batch([(0, 1, 2, 3)], SamplingParams(temperature=0, max_tokens=5))[0]
    assert output.ids == (3, 2, 0, 4, 2)
    assert (local.counters.positions, local.counters.score_pairs) == (16, 144)
    everything = local.generate_batch([(0,)], SamplingParams(temperature=0))[0]
    assert len(everything.ids) == min(SEVEN_SPEC.context_limit - 1, 8 * 4)
    check_empty(local)


def test_closing_the_iterator_frees_the_pages() -> None:
    local = runner()
    events = local.generate(prompt(9), GREEDY)
    next(events)
    assert local.blocks.held_count > 0
    events.close()  # type: ignore[attr-defined]
    check_empty(local)


REFUSED: list[tuple[tuple[int, ...], SamplingParams, str, str]] = [
    ((), GREEDY, "prompt", "EMPTY_PROMPT"),
    ((1, 97), GREEDY, "prompt", "TOKEN_OUT_OF_RANGE"),
    ((1, -1), GREEDY, "prompt", "TOKEN_OUT_OF_RANGE"),
    ((1,) * 512, GREEDY, "prompt_ids", "PROMPT_TOO_LONG"),
    ((1,) * 505, GREEDY, "max_tokens", "PROMPT_TOO_LONG"),
    ((1,) * 250, GREEDY, "max_tokens", "POOL_TOO_SMALL"),
    ((1,) * 300, replace(GREEDY, max_tokens=1), "prompt", "POOL_TOO_SMALL"),
    ((1,), replace(GREEDY, temperature=float("nan")), "temperature", "INVALID_TEMPERATURE"),
    ((1,), replace(GREEDY, stop=("x",)), "stop", "NO_TOKENIZER"),
    ((1,), replace(GREEDY, max_tokens=None, min_tokens=300), "min_tokens", "INVALID_MIN_TOKENS"),
]


@pytest.mark.parametrize(("ids", "params", "field", "reason"), REFUSED, ids=[f"{f}-{r}" for _, _, f, r in REFUSED])
def test_what_can_never_work_is_refused_by_name(
    ids: tuple[int, ...], params: SamplingParams, field: str, reason: str
) -> None:
    local = runner()
    with pytest.raises(InvalidRequest) as caught:
        local.generate(ids, params)
    assert (caught.value.field, caught.value.reason) == (field, reason)
    check_empty(local)
