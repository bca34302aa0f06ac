"""The answer of /v1/chat/completions."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from pdserve.rpc.events import Finish, PositionLogprobs, TokenLogprob
from pdserve.tokenizer import Tokenizer
from router.openai_answer import Answer, Choice
from router.openai_render import Json, logprob_value, sse
from router.openai_tools import Call, ToolUse
from router.request import Request

_ID_LETTERS = string.ascii_letters + string.digits


class ChatAnswer(Answer):
    """`tools`: what the model was offered to call, if anything."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        wants_usage: bool = False,
        wants_ids: bool = False,
        tools: ToolUse | None = None,
    ) -> None:
        super().__init__(requests, wants_usage=wants_usage, wants_ids=wants_ids)
        self._tools = tools
        self._format = None if tools is None else tools.format(requests[0].tokenizer)
        self._readers = (
            [] if tools is None or self._format is None else [self._format.reader(tools.names) for _ in self.choices]
        )
        self._calls: list[list[Json]] = [[] for _ in self.choices]
        self._told = [0] * len(self.choices)  # calls that the stream has

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        bodies = [
            {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None} for choice in self.choices
        ]
        return b"".join(sse(self._chunk(body)) for body in bodies)

    def _visible(self, choice: Choice, text: str, last: bool) -> str:
        if not self._readers:
            return text
        reader = self._readers[choice.index]
        shown, calls = reader.push(text)
        if last:
            rest, more = reader.close()
            shown, calls = shown + rest, [*calls, *more]
        known = self._calls[choice.index]
        for call in calls:
            if self._tools is None or self._tools.several or not known:  # the others were not asked for
                known.append(self._named(call))
        return shown

    def _named(self, call: Call) -> Json:
        length = 24 if self._format is None else self._format.id_length
        name = "".join(secrets.choice(_ID_LETTERS) for _ in range(length))
        return {
            "id": name if length < 24 else f"call_{name}",  # templates of some models want exactly nine letters
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _has_more(self, choice: Choice) -> bool:
        return self._told[choice.index] < len(self._calls[choice.index])

    def _reason(self, choice: Choice, finish: Finish) -> str:
        return "tool_calls" if self._calls[choice.index] else finish.reason

    def _delta(self, choice: Choice, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        delta: Json = {"content": text} if text or finish_reason is None else {}
        if self._has_more(choice):
            told, calls = self._told[choice.index], self._calls[choice.index]
            delta = {
                **({"content": text} if text else {}),
                "tool_calls": [{"index": n, **call} for n, call in enumerate(calls[told:], told)],
            }
            self._told[choice.index] = len(calls)
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _entire(self, choice: Choice, text: str) -> Json:
        calls = self._calls[choice.index]
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        return {
            "index": choice.index,
            "message": {**message, "tool_calls": calls} if calls else message,
            "logprobs": self._logprobs_of(choice.logprobs) if choice.wants_logprobs else None,
            "finish_reason": None if choice.finish is None else self._reason(choice, choice.finish),
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
