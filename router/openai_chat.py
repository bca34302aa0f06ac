"""The answer of /v1/chat/completions."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from pdserve.rpc.events import Finish, PositionLogprobs, TokenLogprob
from pdserve.tokenizer import Tokenizer
from router.openai_answer import Answer, Choice
from router.openai_render import Json, logprob_value, sse
from router.openai_tools import ToolUse
from router.request import Request
from router.tool_readers import Part

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
        self._news: list[list[Json]] = [[] for _ in self.choices]  # what the stream has not been told of them
        self._begun = [0] * len(self.choices)  # calls, those that were not asked for included

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
        shown, parts = reader.push(text)
        if last:
            rest, more = reader.close()
            shown, parts = shown + rest, [*parts, *more]
        for part in parts:
            self._add(choice.index, part)
        return shown

    def _add(self, index: int, part: Part) -> None:
        self._begun[index] += part.name is not None
        if self._tools is not None and not self._tools.several and self._begun[index] > 1:
            return  # it was not asked for
        calls, news = self._calls[index], self._news[index]
        if part.name is not None:
            length = 24 if self._format is None else self._format.id_length
            letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(length))
            call_id = letters if length < 24 else f"call_{letters}"  # templates of some models want just nine letters
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": call_id, "type": "function", "function": function})
            news.append({"index": len(calls) - 1, **calls[-1], "function": function.copy()})
        elif not news or news[-1]["index"] != len(calls) - 1:
            news.append({"index": len(calls) - 1, "function": {"arguments": ""}})
        for entry in (calls[-1], news[-1]):
            entry["function"]["arguments"] += part.arguments

    def _has_more(self, choice: Choice) -> bool:
        return bool(self._news[choice.index])

    def _reason(self, choice: Choice, finish: Finish) -> str:
        """`tool_calls`, unless the output ended within a call."""
        whole = self._calls[choice.index] and not self._readers[choice.index].cut
        return "tool_calls" if whole else finish.reason

    def _delta(self, choice: Choice, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        delta: Json = {"content": text} if text or finish_reason is None else {}
        if news := self._news[choice.index]:
            delta = {**({"content": text} if text else {}), "tool_calls": news}
            self._news[choice.index] = []
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
