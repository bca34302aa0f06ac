"""The tokenizer inside a GGUF file: SentencePiece's BPE (Llama 2, Mistral, Gemma, Phi-3), from pieces and scores.

SentencePiece merges the two neighbours whose joint piece has the best score. The `tokenizers` library wants the merges
written out instead: every way to divide a piece into two others, best score first.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.tokenizer.gguf_metadata import GgufMetadata, damaged

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type
SPACE = "▁"


def tokenizer_json(metadata: GgufMetadata, tokens: list[str]) -> dict[str, object]:
    """tokenizer.json without its post-processor. Raises CheckpointError naming the key at fault."""
    types = metadata.numbers("tokenizer.ggml.token_type", len(tokens))
    scores = metadata.floats("tokenizer.ggml.scores", len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        double = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise damaged("tokenizer.ggml.tokens", f"{double!r} has two ids")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = metadata.token_id("unknown", tokens)
    if unknown is None:
        unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], special=kind != USER_DEFINED)
            for i, kind in enumerate(types)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": _normalizer(prefix),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(prefix),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges(vocab, scores, types),
        },
    }


def merges(vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[list[str]]:
    """Pairs of pieces in the order in which SentencePiece prefers what they make; equals as their ids rise."""
    plain = {token for token, i in vocab.items() if types[i] not in (UNKNOWN, CONTROL, UNUSED, BYTE)}
    found: list[tuple[float, int, int, str, str]] = []
    for piece in plain:
        own = scores[vocab[piece]]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in plain and right in plain:
                found.append((-own, vocab[left], vocab[right], left, right))
    return [[left, right] for _, _, _, left, right in sorted(found)]


def _normalizer(prefix: bool) -> dict[str, object]:
    replace: dict[str, object] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]} if prefix else replace


def _decoder(prefix: bool) -> dict[str, object]:
    steps: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _added(token_id: int, content: str, *, special: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}
