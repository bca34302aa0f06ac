"""The answer of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.rpc.events import PositionLogprobs, TokenLogprob
from pdserve.tokenizer import Tokenizer
from router.openai_answer import Answer, Choice
from router.openai_render import Json, logprob_value, sse


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        bodies = [
            {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None} for choice in self.choices
        ]
        return b"".join(sse(self._chunk(body)) for body in bodies)

    def _delta(self, choice: Choice, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {
            "index": choice.index,
            "delta": {"content": text} if text or finish_reason is None else {},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _entire(self, choice: Choice, text: str) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs_of(choice.logprobs) if choice.wants_logprobs else None,
            "finish_reason": choice.finish.reason if choice.finish is not None else None,
        }

    def _logprobs(self, choice: Choice, positions: Sequence[PositionLogprobs]) -> list[Json]:
        return [logprob_entry(position, choice.request.tokenizer) for position in positions]

    def _logprobs_of(self, entries: Sequence[Json]) -> Json:
        return {"content": list(entries), "refusal": None}


def logprob_entry(position: PositionLogprobs, tokenizer: Tokenizer | None) -> Json:
    top = [_logprob(entry, tokenizer) for entry in position.top]
    return {**_logprob(position.chosen, tokenizer), "top_logprobs": top}


def _logprob(entry: TokenLogprob, tokenizer: Tokenizer | None) -> Json:
    data = tokenizer.token_bytes(entry.id) if tokenizer is not None else b""
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob_value(entry.logprob), "bytes": list(data)}
