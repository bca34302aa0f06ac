"""What a prompt finds of itself at either side, and what it must say."""

from __future__ import annotations

import functools

import torch

from pdserve.client import Completion
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from tests.e2e.stack import Answer, alone_on
from tests.engine.tiny import TINY, tiny_engine

LENGTH = 37  # two pages of 16 and five tokens
GREEDY = SamplingParams(temperature=0, max_tokens=3, seed=0, ignore_eos=True)
TOKEN_BYTES = TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * 4  # K and V of one token
LOGITS_BYTES = TINY.vocab_size * 4


@functools.cache
def local(deterministic: bool) -> LocalRunner:
    torch.set_num_threads(1)
    return LocalRunner(tiny_engine(deterministic=deterministic, pages=256), chunk_tokens=7)


@functools.cache
def expected(ids: tuple[int, ...], deterministic: bool = True) -> Answer:
    return alone_on(local(deterministic), ids, GREEDY)


def whole(tokens: int, page_size: int, of: int = LENGTH) -> int:
    """Tokens that are found of a prompt of `of` tokens, when the first `tokens` are held."""
    return min(tokens, of - 1) // page_size * page_size


def found(completion: Completion) -> tuple[int, int]:
    """Prompt tokens that prefill, and that decode held already; every figure that tells of them must agree."""
    record, usage = completion.record, completion.usage
    assert record is not None
    at_prefill = record.prompt_tokens - record.computed_tokens
    assert usage.cached_prompt_tokens == at_prefill
    assert record.bytes_sent == record.sent_tokens * TOKEN_BYTES + LOGITS_BYTES
    return at_prefill, record.prompt_tokens - record.sent_tokens
