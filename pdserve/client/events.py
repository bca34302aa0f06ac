"""What a generation yields, and how it is read off the stream."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.errors import DataLoss, Unavailable
from pdserve.rpc import convert
from pdserve.rpc.events import Accepted, Finish, HandoffRecord, PositionLogprobs, TokenBatch, Usage
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


Event = Accepted | Tokens | HandoffRecord | Finish


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    usage: Usage
    accepted: Accepted | None
    record: HandoffRecord | None
    logprobs: tuple[PositionLogprobs, ...]


class EventReader:
    """Turns one stream's messages into events: accepted, tokens*, record?, finish.

    Bytes become text here, across messages, so that no character is ever cut in two.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens = 0
        self._finished = False

    def read(self, message: gateway_pb2.GenerateEvent) -> tuple[Event, ...]:
        """Usually one event. Raises the typed error of an error message; DataLoss when tokens are missing."""
        kind = message.WhichOneof("event")
        if kind == "error":
            raise from_detail(message.error)
        if kind == "accepted":
            return (convert.accepted_from_proto(message.accepted),)
        if kind == "tokens":
            return (self._read_tokens(convert.tokens_from_proto(message.tokens)),)
        if kind == "record":
            return (convert.record_from_proto(message.record),)
        if kind == "finish":
            self._finished = True
            rest = self._decoder.decode(b"", final=True)
            last = (Tokens(self._tokens, (), rest),) if rest else ()
            return (*last, convert.finish_from_proto(message.finish))
        return ()  # an event of a newer server, which says nothing that this client knows

    def end(self) -> None:
        """To be called when the stream has ended without an error. Raises Unavailable if it had no finish."""
        if not self._finished:
            raise Unavailable("the answer ended before its finish", reason="STREAM_CUT", remedy="ask again")

    def _read_tokens(self, batch: TokenBatch) -> Tokens:
        if batch.first_index != self._tokens:
            raise DataLoss(
                f"token {batch.first_index} arrived where {self._tokens} was due",
                reason="TOKEN_GAP",
                field="first_index",
                remedy="ask again",
            )
        self._tokens += len(batch.ids)
        return Tokens(batch.first_index, batch.ids, self._decoder.decode(batch.text), batch.logprobs)


def collect(events: Iterable[Event]) -> Completion:
    """Puts a whole answer together. The events must end with a finish, as EventReader makes sure."""
    accepted, record, finish = None, None, None
    tokens: list[Tokens] = []
    for event in events:
        match event:
            case Accepted():
                accepted = event
            case Tokens():
                tokens.append(event)
            case HandoffRecord():
                record = event
            case Finish():
                finish = event
    if finish is None:
        raise Unavailable("the answer ended before its finish", reason="STREAM_CUT", remedy="ask again")
    return Completion(
        text="".join(part.text for part in tokens),
        ids=tuple(token for part in tokens for token in part.ids),
        finish=finish,
        usage=finish.usage,
        accepted=accepted,
        record=record,
        logprobs=tuple(entry for part in tokens for entry in part.logprobs),
    )
