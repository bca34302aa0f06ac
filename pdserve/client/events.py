"""What a generation yields, and how it is read off the stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pdserve.client.request import unread
from pdserve.errors import DataLoss, Unavailable
from pdserve.rpc import convert
from pdserve.rpc.events import (
    Accepted,
    Finish,
    HandoffRecord,
    PositionLogprobs,
    TokenBatch,
    ToolCallPart,
    Usage,
)
from pdserve.rpc.status import from_detail
from pdserve.v1 import gateway_pb2


@dataclass(frozen=True)
class Tokens:
    """Output tokens [first_index, first_index + len(ids)), and the text they released.

    Text may lag behind ids: a character or a possible stop string is held back until it is whole.
    """

    first_index: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    choice: int = 0  # which of several outputs
    tool_calls: tuple[ToolCallPart, ...] = ()  # with a tool_choice: calls that begin, and more of their arguments


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that the model wants to have made."""

    id: str  # what the message with its result names as tool_call_id
    name: str
    arguments: str  # JSON as the model wrote it

    def as_message(self) -> dict[str, object]:
        """As it stands in `tool_calls` of an assistant's message."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


Event = Accepted | Tokens | HandoffRecord | Finish


@dataclass(frozen=True)
class Choice:
    """One of the outputs of an answer."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[PositionLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer. Text, ids, finish, logprobs and calls are those of the first choice; `accepted` is of the first
    of several prompts, whose choices come prompt by prompt.
    """

    text: str
    ids: tuple[int, ...]
    finish: Finish
    usage: Usage  # each prompt once, and the output of all choices
    accepted: Accepted | None
    record: HandoffRecord | None
    logprobs: tuple[PositionLogprobs, ...]
    choices: tuple[Choice, ...] = ()  # all `n` of them, of each prompt

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls


class _Output:
    """One choice as far as it has come."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tokens = 0


class EventReader:
    """Turns one stream's messages into events: accepted, tokens*, record?, finish; several outputs mixed.

    Bytes become text here, across messages, so that no character is ever cut in two.

    Args:
        outputs: how many were asked for.
        later: fields of the request that the router must say it has read.
    """

    def __init__(self, outputs: int = 1, later: frozenset[str] = frozenset()) -> None:
        self._outputs = [_Output() for _ in range(outputs)]
        self._unread = later
        self._open = outputs  # that have not ended

    def read(self, message: gateway_pb2.GenerateEvent) -> tuple[Event, ...]:
        """Usually one event. Raises the typed error of an error message; Refused for an option that the router does not
        know, DataLoss when tokens are missing.
        """
        kind = message.WhichOneof("event")
        if kind == "error":
            raise from_detail(message.error)
        if kind == "accepted":
            accepted = convert.accepted_from_proto(message.accepted)
            self._unread -= frozenset(accepted.read_fields)
        if self._unread and kind in ("accepted", "tokens", "finish"):
            raise unread(self._unread)
        if kind == "accepted":
            return (accepted,)
        if kind == "tokens":
            calls = tuple(map(convert.call_from_proto, message.tool_calls))
            return (self._read_tokens(convert.tokens_from_proto(message.tokens), calls),)
        if kind == "record":
            return (convert.record_from_proto(message.record),)
        if kind == "finish":
            finish = convert.finish_from_proto(message.finish)
            output = self._output(finish.choice)
            self._open -= 1
            rest = output.decoder.decode(b"", final=True)
            last = (Tokens(output.tokens, (), rest, choice=finish.choice),) if rest else ()
            return (*last, finish)
        return ()  # an event of a newer server, which says nothing that this client knows

    def end(self) -> None:
        """To be called when the stream has ended without an error. Raises Unavailable if it had no finish."""
        if self._open:
            raise Unavailable("the answer ended before its finish", reason="STREAM_CUT", remedy="ask again")

    def _output(self, choice: int) -> _Output:
        if choice >= len(self._outputs):
            raise DataLoss(
                f"something of choice {choice} arrived, and {len(self._outputs)} were asked for",
                reason="UNKNOWN_CHOICE",
                field="choice",
                remedy="ask again",
            )
        return self._outputs[choice]

    def _read_tokens(self, batch: TokenBatch, calls: tuple[ToolCallPart, ...]) -> Tokens:
        output = self._output(batch.choice)
        if batch.first_index != output.tokens:
            raise DataLoss(
                f"token {batch.first_index} arrived where {output.tokens} was due",
                reason="TOKEN_GAP",
                field="first_index",
                remedy="ask again",
            )
        output.tokens += len(batch.ids)
        text = output.decoder.decode(batch.text)
        return Tokens(batch.first_index, batch.ids, text, batch.logprobs, batch.choice, calls)


def collect(events: Iterable[Event]) -> Completion:
    """Puts a whole answer together. The events must end with each choice's finish, as EventReader makes sure."""
    accepted: dict[int, Accepted] = {}
    record = None
    tokens: list[Tokens] = []
    ends: dict[int, Finish] = {}
    for event in events:
        match event:
            case Accepted():
                accepted[event.prompt] = event
            case Tokens():
                tokens.append(event)
            case HandoffRecord():
                record = event
            case Finish():
                ends[event.choice] = event
    if not ends:
        raise Unavailable("the answer ended before its finish", reason="STREAM_CUT", remedy="ask again")
    choices = tuple(_choice(ends[number], [t for t in tokens if t.choice == number]) for number in sorted(ends))
    first = choices[0]
    prompts = len(accepted) or 1
    usages = [choice.finish.usage for choice in choices]
    each = usages[:: len(usages) // prompts]  # the first choice of every prompt
    usage = Usage(
        prompt_tokens=sum(u.prompt_tokens for u in each),
        output_tokens=sum(u.output_tokens for u in usages),
        cached_prompt_tokens=sum(u.cached_prompt_tokens for u in each),
    )
    return Completion(first.text, first.ids, first.finish, usage, accepted.get(0), record, first.logprobs, choices)


def _choice(finish: Finish, tokens: Sequence[Tokens]) -> Choice:
    return Choice(
        text="".join(part.text for part in tokens),
        ids=tuple(token for part in tokens for token in part.ids),
        finish=finish,
        logprobs=tuple(entry for part in tokens for entry in part.logprobs),
        tool_calls=tuple(whole_calls(part for piece in tokens for part in piece.tool_calls)),
    )


def whole_calls(parts: Iterable[ToolCallPart]) -> Iterator[ToolCall]:
    """The calls of one choice, whose parts follow each other."""
    for _, of_one in groupby(parts, key=lambda part: part.index):
        first, *more = of_one
        yield ToolCall(first.id, first.name, first.arguments + "".join(part.arguments for part in more))
