"""Ids to text, one at a time, in constant time per token and without losing a byte."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.tokenizer.tokenizer import Tokenizer

_SURROGATES = frozenset(bytes((0xED, second)) for second in range(0xA0, 0xC0))


class IncrementalDetokenizer:
    """State of one output stream; not thread-safe.

    What all pushes and the final flush return, joined, are the true bytes of the ids: no character
    is cut, none is replaced. Bytes that can still become a character are held (three at most);
    bytes that no longer can are released as they are, since a model may emit anything.

    Special tokens, end tokens and ids beyond the tokenizer add nothing (a model's vocabulary is
    often padded past its tokenizer); they still count as tokens for the caller.

    Args:
        tokenizer: None for a model served without one; every push is then empty.
        continuation: SentencePiece texts lose the space before their first word. False: the ids
            are a text of their own, as `Tokenizer.decode` takes them. True: they continue a
            prompt, so that space separates the two and stays. No difference for byte-level models.
        special: special and end tokens add their names.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, continuation: bool = False, special: bool = False) -> None:
        self._pieces = tokenizer.pieces if tokenizer is not None else None
        self._special = special
        self._held = b""
        plan = self._pieces.plan if self._pieces is not None else None
        self._first = plan is not None and not continuation
        self._strip_left = plan.strip_count if plan is not None and not continuation else 0

    def push(self, token_id: int) -> bytes:
        """Whole UTF-8 characters that this token completes; may be empty."""
        if self._pieces is None:
            return b""
        if not self._pieces.is_silent(token_id):
            piece = self._pieces.emitted(token_id, first=self._first)
        elif self._special and self._pieces.exists(token_id):
            piece = self._pieces.text(token_id)
        else:
            return b""
        self._first = False
        if self._strip_left and piece:
            piece = self._strip_start(piece)
        data = self._held + piece
        # The decoder stops before a trailing sequence that may still become a character.
        whole = utf_8_decode(data, "replace", False)[1]
        if data[whole:] in _SURROGATES:  # for which it waits too, in case they are to be let through
            whole = len(data)
        self._held = data[whole:]
        return data[:whole]

    def flush(self) -> bytes:
        """The held bytes of a character that never ended; afterwards nothing is held."""
        held, self._held = self._held, b""
        return held

    def _strip_start(self, piece: bytes) -> bytes:
        sign = self._pieces.plan.strip if self._pieces is not None else b""
        while self._strip_left and sign and piece.startswith(sign):
            piece = piece[len(sign) :]
            self._strip_left -= 1
        if piece:
            self._strip_left = 0  # the text has begun
        return piece
