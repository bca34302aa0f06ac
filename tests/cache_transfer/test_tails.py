"""Prompts whose last part is shorter than a chunk or a page: exactly the prompt is carried, not one token less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.engine.plan import Chunk
from pdserve.errors import DataLoss, Incompatible, PdserveError
from tests.cache_transfer.by_hand import make_commit, make_frames, make_logits, make_open, push_bytes
from tests.cache_transfer.changes import wire
from tests.cache_transfer.engines import hand_over, prefill
from tests.cache_transfer.support import make_pair, random_cache
from tests.engine.tiny import greedy, prompt, run, tiny_engine

CHUNK, PAGE = 16, 4
LENGTHS = (CHUNK + 1, 2 * CHUNK + PAGE - 1, 2 * CHUNK + 1, CHUNK - 1, 1, PAGE + 1)


@pytest.mark.parametrize("length", LENGTHS)
async def test_the_last_short_chunk_arrives_with_the_others(length: int) -> None:
    ids = prompt(length, seed=length)
    baseline = tiny_engine(deterministic=True, pages=16)
    expected, expected_logits, _ = greedy(baseline, ids, tuple(range(16)), 3)
    source, target = tiny_engine(deterministic=True, pages=16), tiny_engine(deterministic=True, pages=16, page_size=3)
    pages, other = tuple(range(15, -1, -1)), tuple(range(16))
    logits = prefill(source, ids, pages, chunk=CHUNK)
    report, taken = await hand_over(source, pages, target, other, ids, logits, frame_bytes=500)
    spec = source.spec
    assert report.sent_tokens == length
    assert report.payload_bytes == spec.layers * 2 * length * spec.kv_heads * spec.head_dim * 4
    assert taken.logits is not None and taken.logits.position == length - 1
    assert taken.logits.data == expected_logits[0].numpy().tobytes()
    for step in range(2):
        out = run(target, Chunk("r", (expected[step],), length + step, other))
        assert torch.equal(out.logits["r"][0], expected_logits[step + 1])


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1])
async def test_one_token_fewer_is_refused_wherever_it_is_left_out(length: int) -> None:
    """In the identity, in the frames with an honest commit, or in frames and commit alike."""
    cases: list[tuple[str, type[PdserveError], str]] = [
        ("identity", Incompatible, "IDENTITY_MISMATCH"),
        ("frames", DataLoss, "FRAMES_MISSING"),
        ("commit", DataLoss, "FRAMES_MISSING"),
    ]
    async with make_pair("grpc") as pair:
        for where, error, reason in cases:
            ticket, identity = pair.issue(length)
            short = replace(identity, end=length - 1)
            cache = random_cache(pair.sends, length)
            frames = make_frames(ticket, short, pair.sends, cache)
            logits = make_logits(ticket, identity, pair.sends)
            opening = make_open(ticket, short if where == "identity" else identity, pair.sends)
            commit = make_commit(ticket, identity if where == "frames" else short, frames, logits)
            with pytest.raises(error) as caught:
                await push_bytes(pair, wire([opening, *frames, logits, commit]))
            assert caught.value.reason == reason
        assert pair.host.done == []
        await pair.check_next_handoff_works()
