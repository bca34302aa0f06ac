"""A byte-level tokenizer of 97 tokens, as many as the tiny model has: one per byte of interest."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pdserve.tokenizer import Bundle

# ASCII from ! to ~, the space (whose letter in the byte alphabet is Ġ), and the two bytes of é.
LETTERS = (*map(chr, range(0x21, 0x7F)), "Ġ", "Ã", "©")
SPACE, E_FIRST, E_SECOND = 94, 95, 96


def small_bundle(eos_ids: tuple[int, ...] = ()) -> Bundle:
    backend = Backend(models.BPE(vocab={letter: n for n, letter in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Bundle(tokenizer_json=backend.to_str(), eos_ids=eos_ids, vocab_size=len(LETTERS))


def ids_of(text: str) -> tuple[int, ...]:
    """Token ids of ASCII text and é."""
    return tuple({0x20: SPACE, 0xC3: E_FIRST, 0xA9: E_SECOND}.get(byte, byte - 0x21) for byte in text.encode())
