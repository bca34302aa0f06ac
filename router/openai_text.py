"""The answer of /v1/completions: `n` choices per prompt, text as it is, logprobs as four lists."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pdserve.rpc.events import PositionLogprobs, TokenLogprob
from pdserve.tokenizer import Tokenizer
from router.openai_answer import Answer, Choice
from router.openai_render import Json, logprob_value, sse
from router.request import Ask, Request, TextPrompt


class TextAnswer(Answer):
    """`echoes` has each prompt's text if it is to come before the output, or is empty."""

    prefix = "cmpl"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        requests: Sequence[Request],
        wants_usage: bool = False,
        wants_ids: bool = False,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(requests, wants_usage, wants_ids)
        self._offsets = [_Offset(choice.request.tokenizer) for choice in self.choices]
        texts = [echo for echo, request in zip(echoes, requests, strict=bool(echoes)) for _ in range(request.n)]
        for choice, echo in zip(self.choices, texts, strict=bool(echoes)):
            choice.text.append(echo)

    def opening(self) -> bytes:
        told = [(choice, "".join(choice.text)) for choice in self.choices]
        return b"".join(sse(self._chunk(self._delta(choice, text, None, None))) for choice, text in told if text)

    def _delta(self, choice: Choice, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _entire(self, choice: Choice, text: str) -> Json:
        reason = choice.finish.reason if choice.finish is not None else None
        return self._delta(choice, text, self._logprobs_of(choice.logprobs) if choice.wants_logprobs else None, reason)

    def _logprobs(self, choice: Choice, positions: Sequence[PositionLogprobs]) -> list[Json]:
        tokenizer, offset = choice.request.tokenizer, self._offsets[choice.index]
        return [_entry(position, tokenizer, offset.pass_by(position.chosen.id)) for position in positions]

    def _logprobs_of(self, entries: Sequence[Json]) -> Json:
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [entry["top"] for entry in entries],
            "text_offset": [entry["offset"] for entry in entries],
        }


def echo_of(ask: Ask, request: Request) -> str:
    """The prompt's text: as it was sent, or that of its ids."""
    if isinstance(ask.prompt, TextPrompt):
        return ask.prompt.text
    return "" if request.tokenizer is None else request.tokenizer.decode(request.prompt_ids)


class _Offset:
    """Where the next token's text begins, in characters of the output."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def pass_by(self, token: int) -> int:
        begin = self._characters
        if self._tokenizer is not None:
            self._characters += len(self._decoder.decode(self._tokenizer.pieces.emitted(token)))
        return begin


def _entry(position: PositionLogprobs, tokenizer: Tokenizer | None, offset: int) -> Json:
    chosen = position.chosen
    # The chosen token is always among them, so there may be one more than was asked for.
    both = (chosen, *position.top)
    return {
        "token": _name(chosen, tokenizer),
        "logprob": logprob_value(chosen.logprob),
        "top": {_name(entry, tokenizer): logprob_value(entry.logprob) for entry in both},
        "offset": offset,
    }


def _name(entry: TokenLogprob, tokenizer: Tokenizer | None) -> str:
    """The token's text. Bytes that are no text, and ids without any, get a name that no other token has."""
    data = b"" if tokenizer is None else tokenizer.token_bytes(entry.id)
    try:
        return data.decode() or f"token_id:{entry.id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
