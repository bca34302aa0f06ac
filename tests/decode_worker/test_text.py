"""Text through the services: whole characters, stop strings across tokens, end ids without text."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from decode_worker.sampling import Sampler
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.events import STOP, TokenBatch
from pdserve.tokenizer import Tokenizer
from tests.decode_worker.rig import local, rig
from tests.decode_worker.small_bundle import small_bundle
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(seed=4, max_tokens=40, temperature=2.0)
BUNDLE = small_bundle()


async def test_text_equals_the_ids_decoded() -> None:
    expected = local([prompt(9)], PARAMS, BUNDLE)[0]
    async with rig(bundle=BUNDLE) as r:
        answer = await r.generate(prompt(9), PARAMS)
    assert (answer.ids, answer.text) == (expected.ids, expected.text)
    assert answer.text.decode(errors="replace") == Tokenizer(BUNDLE).decode(answer.ids)
    assert len(answer.text) == 40  # each token is one byte


async def test_a_stop_string_over_several_tokens_cuts_the_text() -> None:
    free = local([prompt(9)], PARAMS, BUNDLE)[0]
    stop = free.text[10:14].decode()
    assert free.text.index(stop.encode()) == 10
    params = replace(PARAMS, stop=("never here", stop))
    async with rig(bundle=BUNDLE) as r:
        answer = await r.generate(prompt(9), params)
        assert answer.text == free.text[:10] and answer.ids == free.ids[:14]
        assert answer.finish is not None and answer.finish == local([prompt(9)], params, BUNDLE)[0].finish
        assert (answer.finish.reason, answer.finish.stop_string) == (STOP, stop)
        # Before min_tokens the same text does not stop.
        later = await r.generate(prompt(9), replace(params, min_tokens=14))
        assert later.text == free.text


async def test_the_bundles_end_ids_count_besides_the_models() -> None:
    free = local([prompt(9)], PARAMS, BUNDLE)[0]
    end = free.ids[6]
    first = free.ids.index(end)
    bundle = small_bundle(eos_ids=(end,))
    async with rig(bundle=bundle) as r:
        answer = await r.generate(prompt(9), PARAMS)
    assert answer.ids == free.ids[: first + 1] and answer.text == free.text[:first]
    assert answer.finish is not None and answer.finish.stop_token_id == end


async def test_a_resumed_output_gives_the_rest_of_the_text() -> None:
    stop = local([prompt(9)], PARAMS, BUNDLE)[0].text[10:14].decode()
    params = replace(PARAMS, stop=(stop,))
    runner = LocalRunner(tiny_engine(deterministic=True), BUNDLE)
    batches = [event for event in runner.generate(prompt(9), params) if isinstance(event, TokenBatch)]
    ids = tuple(batch.ids[0] for batch in batches)
    async with rig(bundle=BUNDLE) as r:
        for done in (1, 11, 12, 13):  # also in the middle of the stop string
            answer = await r.generate(prompt(9), params, output=ids[:done])
            assert answer.ids == ids[done:]
            assert answer.text == b"".join(batch.text for batch in batches[done:])


def test_the_first_token_can_be_checked_by_hand() -> None:
    """Token 0 takes the sampler's path: the same logits and key give the same token."""
    rows: list[Tensor] = []
    runner = LocalRunner(tiny_engine(deterministic=True))
    output = [
        event.ids[0]
        for event in runner.generate(prompt(9), PARAMS, observe=lambda number, index, row: rows.append(row.clone()))
        if isinstance(event, TokenBatch)
    ]
    sampler = Sampler(PARAMS, prompt(9))
    for row, token in zip(rows, output, strict=True):
        assert sampler.choose(row.double().numpy()).token == token
        sampler.record(token)
