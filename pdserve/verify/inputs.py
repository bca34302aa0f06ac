"""The prompts that every side runs: given as text or ids, or a default set with the lengths that matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.request import check_token_ids
from pdserve.tokenizer import Bundle, Tokenizer

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    return n if n < 2 else",
    "Größe, 数据, 👩‍🚀 and naïve: not every character is one token.",
    "Once upon a time, in a village between two mountains, there lived a clockmaker who had never been late. "
    "Every morning she wound the great clock of the town hall, and every evening she asked it the same question.",
)
_LENGTHS = (1, 5, 17, 70)  # of the default prompts for a model without a tokenizer
_SPARE = 5  # tokens by which the longest default prompt passes pages and chunks: a ragged end


@dataclass(frozen=True)
class Limits:
    """What the sides take."""

    vocab_size: int
    context: int  # tokens of a prompt
    unit: int  # tokens of the largest page or chunk of any side


def make_prompts(
    texts: Sequence[str], ids: Sequence[tuple[int, ...]], bundle: Bundle | None, limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt; the default set when none is given.

    Raises ConfigError for text without a tokenizer and for prompts that do not fit; InvalidRequest
    for ids outside the vocabulary.
    """
    prompts = list(ids)
    if texts or not ids:
        prompts += _encoded(texts or TEXTS, bundle, limits, default=not texts)
    for prompt in prompts:
        check_token_ids(prompt, limits.vocab_size, "prompt")
        if len(prompt) > limits.context:
            raise ConfigError(
                f"{len(prompt)} tokens are more than the {limits.context} that every side takes",
                field="prompt",
                remedy="give a shorter prompt",
            )
    return tuple(prompts)


def _encoded(texts: Sequence[str], bundle: Bundle | None, limits: Limits, *, default: bool) -> list[tuple[int, ...]]:
    if bundle is None and not default:
        raise ConfigError("this model has no tokenizer", field="prompt", remedy="use --token-ids")
    if bundle is None:
        draw = random.Random(7)
        found = [tuple(draw.randrange(limits.vocab_size) for _ in range(length)) for length in _LENGTHS]
    else:
        tokenizer = Tokenizer(bundle)
        found = [tokenizer.encode(text) for text in texts]
    if not default:
        return found
    longest, wanted = found[-1], limits.unit + _SPARE
    while len(longest) < wanted:
        longest += found[-1][: wanted - len(longest)]
    return [prompt[: limits.context] for prompt in (*found[:-1], longest)]
