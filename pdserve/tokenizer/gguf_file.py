"""The tokenizer inside a GGUF file: byte-level BPE, from the file's metadata; SentencePiece's is in gguf_spm.py.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it; `_PRE_TOKENIZERS`
holds what each name stands for, as in the tokenizer.json of the models it was made for. A wrong
split changes ids silently, so a name that is not known is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import CheckpointError
from pdserve.tokenizer import gguf_spm
from pdserve.tokenizer.build import build_bundle, with_bos
from pdserve.tokenizer.bundle import Bundle
from pdserve.tokenizer.gguf_metadata import GgufMetadata, damaged, read_metadata

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")  # end of sequence, of turn, of message

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2_SPLIT = {**_BYTE_LEVEL, "use_regex": True}  # the library has GPT-2's expression built in


@dataclass(frozen=True)
class _PreTokenizer:
    steps: tuple[Mapping[str, object], ...]
    normalizer: Mapping[str, object] | None = None
    whole_words: bool = False  # a word that is in the vocabulary is not built from merges
    add_bos: bool = False  # what holds when the file does not say


def _split(expression: str) -> Mapping[str, object]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _llama_like(digits: str) -> str:
    """The expression of the GPT-4 family; models differ in how many digits stay together."""
    return "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # English contractions
            r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with the sign before it
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation with the line ends after it
            r"\s*[\r\n]+",
            r"\s+(?!\S)",  # white space, except the last before a word
            r"\s+",
        )
    )


def _cased() -> str:
    """The expression of GPT-4o: a word ends before a change from small letters to capital ones, contractions in it."""
    first, capital, small = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return "|".join(
        (
            f"{first}{capital}*{small}+{contraction}",
            f"{first}{capital}+{small}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",  # punctuation with the line ends and slashes after it
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


_GPT2 = _PreTokenizer((_GPT2_SPLIT,))
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(({"type": "Digits", "individual_digits": True}, _GPT2_SPLIT)),
    "qwen2": _PreTokenizer((_split(_llama_like(r"\p{N}")), _BYTE_LEVEL), normalizer={"type": "NFC"}),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), _PreTokenizer((_split(_cased()), _BYTE_LEVEL))),
    "llama-bpe": _PreTokenizer((_split(_llama_like(r"\p{N}{1,3}")), _BYTE_LEVEL), whole_words=True, add_bos=True),
}


def bundle_from_gguf(path: str | Path) -> Bundle:
    """Raises CheckpointError if the file is damaged, has no tokenizer, or one that is not supported."""
    bundle = gguf_bundle(Path(path))
    if bundle is None:
        raise CheckpointError(
            f"{path} holds no tokenizer",
            reason="NO_TOKENIZER",
            field="tokenizer.ggml.model",
            remedy="convert the model again with its vocabulary",
        )
    return bundle


def gguf_bundle(path: Path) -> Bundle | None:
    """As `bundle_from_gguf`, but None for a file that holds a model without tokenizer."""
    metadata = read_metadata(path)
    if metadata.get("tokenizer.ggml.model", str, "none") in ("none", "no_vocab"):
        return None
    tokens = metadata.texts("tokenizer.ggml.tokens")
    model = metadata.need("tokenizer.ggml.model", str)
    if model == "llama":
        content, add_bos = gguf_spm.tokenizer_json(metadata, tokens), True
    elif model == "gpt2":
        name = metadata.get("tokenizer.ggml.pre", str, "default")
        if name not in _PRE_TOKENIZERS:
            raise _unsupported("tokenizer.ggml.pre", name, ", ".join(sorted(_PRE_TOKENIZERS)))
        pre = _PRE_TOKENIZERS[name]
        content, add_bos = _tokenizer_json(metadata, tokens, pre), pre.add_bos
    else:
        raise _unsupported("tokenizer.ggml.model", model, "gpt2 (byte-level BPE), llama (SentencePiece's BPE)")
    special = {
        key: tokens[i] for key, i in ((k, metadata.token_id(v, tokens)) for k, v in _NAMED.items()) if i is not None
    }
    if metadata.get("tokenizer.ggml.add_bos_token", bool, add_bos) and "bos_token" in special:
        content = with_bos(content, special["bos_token"], tokens.index(special["bos_token"]))
    ends = (metadata.token_id(end, tokens) for end in _ENDS)
    return build_bundle(
        content,
        chat_template=metadata.get("tokenizer.chat_template", str, ""),
        special_tokens=special,
        eos_ids={token for token in ends if token is not None},
    )


def _tokenizer_json(metadata: GgufMetadata, tokens: list[str], pre: _PreTokenizer) -> dict[str, object]:
    types = metadata.numbers("tokenizer.ggml.token_type", len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        double = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise damaged("tokenizer.ggml.tokens", f"{double!r} has two ids")
    merges = [merge.split(" ") for merge in metadata.texts("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2:
            raise damaged("tokenizer.ggml.merges", f"{' '.join(merge)!r} is not a pair")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], special=kind == _CONTROL)
            for i, kind in enumerate(types)
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _added(token_id: int, content: str, *, special: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def _unsupported(key: str, value: str, supported: str) -> CheckpointError:
    return CheckpointError(
        f"{value!r} is not supported",
        reason="UNSUPPORTED_TOKENIZER",
        field=key,
        remedy=f"supported: {supported}; or use the model's directory with its tokenizer.json",
    )
