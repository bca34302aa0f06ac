"""The bytes one token id stands for, from the decoder described in tokenizer.json.

Two families are understood, each in constant time per token:

    byte level    a token's letters are bytes in the GPT-2 alphabet (Radford et al. 2019): 188 printable
                  bytes stand for themselves, the other 68 are moved up to code points from 256 on
    SentencePiece a token is text with a visible space sign, and <0xNN> tokens are single bytes

Working in bytes loses nothing: characters that are spread over tokens meet again in the stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

from pdserve.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Letter -> byte, for all 256 bytes, in the GPT-2 alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_ALPHABET = byte_alphabet()


@dataclass(frozen=True)
class DecoderPlan:
    """How token text becomes bytes, and what a whole text loses at its start."""

    byte_level: bool = False
    byte_fallback: bool = False
    replaces: tuple[tuple[str, str], ...] = ()
    strip: bytes = b""  # dropped up to `strip_count` times from the start of a text
    strip_count: int = 0
    drop_in_first: str = ""  # dropped wherever it stands in the first token (Metaspace)

    def to_bytes(self, token: str, *, first: bool = False) -> bytes:
        """The bytes of one ordinary token; `first`: no token came before it in its text."""
        if self.byte_level:
            return _from_alphabet(token)
        if first and self.drop_in_first:
            token = token.replace(self.drop_in_first, "")
        for old, new in self.replaces:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def plan_of(decoder: object) -> DecoderPlan:
    """Reads tokenizer.json's `decoder`. Raises CheckpointError for a step that is not understood."""
    plan = DecoderPlan()
    steps = list(_flatten(decoder))
    if not steps:
        raise _unsupported("none")
    fused = False
    for step in steps:
        kind = step.get("type")
        if plan.byte_level and kind != "Fuse":
            raise _unsupported(f"{kind} after ByteLevel")
        match kind:
            case "ByteLevel" if plan == DecoderPlan() and not fused:
                plan = DecoderPlan(byte_level=True)
            case "Fuse":
                fused = True
            case "Replace" if not fused and not plan.byte_fallback:
                plan = _with(plan, replaces=(*plan.replaces, _replacement(step)))
            case "ByteFallback" if not fused:
                plan = _with(plan, byte_fallback=True)
            case "Metaspace" if not fused:
                sign = str(step.get("replacement", "▁"))
                keeps = step.get("prepend_scheme", "always") == "never"
                plan = _with(plan, replaces=(*plan.replaces, (sign, " ")), drop_in_first="" if keeps else sign)
            case "Strip" if fused and not step.get("stop"):
                plan = _with(plan, strip=str(step["content"]).encode(), strip_count=int(str(step["start"])))
            case _:
                raise _unsupported(str(kind))
    return plan


class Pieces:
    """Id -> bytes for one tokenizer; thread-safe (its cache only ever gains equal values)."""

    def __init__(self, backend: Backend, plan: DecoderPlan, silent: frozenset[int]) -> None:
        """`silent`: further ids that stand for no text, such as end tokens that are not marked special."""
        self.plan = plan
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._silent = silent | {token_id for token_id, token in added.items() if token.special}
        self._cache: dict[int, bytes] = {}

    def text(self, token_id: int) -> bytes:
        """The token's own bytes, a special token's name included; empty for an id that does not exist."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._render(token_id, first=False)
        return known

    def is_silent(self, token_id: int) -> bool:
        """Special and end tokens, and ids beyond the tokenizer, add nothing to a text."""
        return token_id in self._silent or not self.exists(token_id)

    def exists(self, token_id: int) -> bool:
        return 0 <= token_id < 2**32 and self._backend.id_to_token(token_id) is not None

    def emitted(self, token_id: int, *, first: bool = False) -> bytes:
        """What the token adds to a text; `first`: nothing has been emitted before it."""
        if token_id in self._silent:
            return b""
        return self._render(token_id, first=True) if first else self.text(token_id)

    def _render(self, token_id: int, *, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id) if self.exists(token_id) else None
        if token is None:
            return b""
        if self.plan.byte_level and token_id in self._added:
            return token.encode()  # added tokens are plain text, not letters of the alphabet
        return self.plan.to_bytes(token, first=first)


def _from_alphabet(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[letter] for letter in token)
    except KeyError:
        return token.encode()  # not a byte-level spelling: the token is text as it stands


def _flatten(decoder: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


def _replacement(step: Mapping[str, object]) -> tuple[str, str]:
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
        case _:
            raise _unsupported("Replace with a regular expression")


def _with(plan: DecoderPlan, **changes: object) -> DecoderPlan:
    return DecoderPlan(**{**plan.__dict__, **changes})


def _unsupported(kind: str) -> CheckpointError:
    return CheckpointError(
        f"token decoder {kind} is not supported",
        reason="UNSUPPORTED_TOKENIZER",
        field="tokenizer.json decoder",
        remedy="supported: ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip as SentencePiece uses them",
    )
