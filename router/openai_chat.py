"""The answer of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.rpc.events import Finish, PositionLogprobs, TokenLogprob, ToolCallPart
from pdserve.tokenizer import Tokenizer
from router.openai_answer import Answer, Choice
from router.openai_render import Json, logprob_value, sse
from router.openai_tools import ToolUse
from router.request import Request
from router.tool_calls import OutputCalls


class ChatAnswer(Answer):
    """`tools`: what the model was offered to call, if anything."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        requests: Sequence[Request],
        wants_usage: bool = False,
        wants_ids: bool = False,
        tools: ToolUse | None = None,
    ) -> None:
        super().__init__(requests, wants_usage, wants_ids)
        self._calls = [None if tools is None else OutputCalls(tools, c.request.tokenizer) for c in self.choices]

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        bodies = [
            {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None} for choice in self.choices
        ]
        return b"".join(sse(self._chunk(body)) for body in bodies)

    def _visible(self, choice: Choice, text: str, last: bool) -> str:
        calls = self._calls[choice.index]
        return text if calls is None else calls.push(text, last=last)

    def _has_more(self, choice: Choice) -> bool:
        calls = self._calls[choice.index]
        return calls is not None and calls.waiting

    def _reason(self, choice: Choice, finish: Finish) -> str:
        calls = self._calls[choice.index]
        return finish.reason if calls is None else calls.reason(finish.reason)

    def _delta(self, choice: Choice, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        told = [{"index": part.index, **_call(part)} for part in self._told(choice)]
        content = {"content": text} if text or not (told or finish_reason) else {}
        delta = {**content, "tool_calls": told} if told else content
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _entire(self, choice: Choice, text: str) -> Json:
        calls = [_call(part) for part in self._told(choice)]  # nothing was told before: each is whole
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        return {
            "index": choice.index,
            "message": {**message, "tool_calls": calls} if calls else message,
            "logprobs": self._logprobs_of(choice.logprobs) if choice.wants_logprobs else None,
            "finish_reason": None if choice.finish is None else self._reason(choice, choice.finish),
        }

    def _told(self, choice: Choice) -> tuple[ToolCallPart, ...]:
        calls = self._calls[choice.index]
        return () if calls is None else calls.take()

    def _logprobs(self, choice: Choice, positions: Sequence[PositionLogprobs]) -> list[Json]:
        return [logprob_entry(position, choice.request.tokenizer) for position in positions]

    def _logprobs_of(self, entries: Sequence[Json]) -> Json:
        return {"content": list(entries), "refusal": None}


def _call(part: ToolCallPart) -> Json:
    """A call that begins, or more of one."""
    function = {"arguments": part.arguments}
    if not part.name:
        return {"function": function}
    return {"id": part.id, "type": "function", "function": {"name": part.name, **function}}


def logprob_entry(position: PositionLogprobs, tokenizer: Tokenizer | None) -> Json:
    top = [_logprob(entry, tokenizer) for entry in position.top]
    return {**_logprob(position.chosen, tokenizer), "top_logprobs": top}


def _logprob(entry: TokenLogprob, tokenizer: Tokenizer | None) -> Json:
    data = tokenizer.token_bytes(entry.id) if tokenizer is not None else b""
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob_value(entry.logprob), "bytes": list(data)}
