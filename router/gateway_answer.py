"""The events of a gRPC answer, in protobuf: choices of all prompts in one row, echoes, calls apart from the text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pdserve.rpc.convert import (
    accepted_to_proto,
    call_to_proto,
    finish_to_proto,
    record_to_proto,
    tokens_to_proto,
    usage_to_proto,
)
from pdserve.rpc.events import Accepted, Finish, HandoffRecord, TokenBatch, Usage
from pdserve.v1 import common_pb2, gateway_pb2
from router.openai_tools import ToolUse
from router.request import Request
from router.tool_calls import OutputCalls


class _Reading:
    """An output whose calls are told apart from its text. Mutable."""

    def __init__(self, calls: OutputCalls) -> None:
        self.calls = calls
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens = 0

    def read(self, batch: TokenBatch) -> gateway_pb2.GenerateEvent:
        self._tokens += len(batch.ids)
        return self._event(batch, self.calls.push(self._decoder.decode(batch.text)))

    def rest(self, choice: int) -> Iterator[gateway_pb2.GenerateEvent]:
        """What the end tells of calls that had not been certain before, if anything."""
        text = self.calls.push(self._decoder.decode(b"", final=True), last=True)
        if text or self.calls.waiting:
            yield self._event(TokenBatch(self._tokens, (), choice=choice), text)

    def _event(self, batch: TokenBatch, text: str) -> gateway_pb2.GenerateEvent:
        return gateway_pb2.GenerateEvent(
            tokens=tokens_to_proto(replace(batch, text=text.encode())),
            tool_calls=[call_to_proto(part) for part in self.calls.take()],
        )


class GatewayAnswer:
    """One answer. Events come as (number of the prompt, event). Mutable.

    Args:
        tools: what the model was offered to call, if calls are to be read.
        echoes: each prompt's text if it is to come before the output, or nothing.
        read: the fields that were, see later_fields.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tools: ToolUse | None,
        echoes: Sequence[str] = (),
        read: Iterable[str] = (),
    ) -> None:
        self._requests = requests
        self._read = tuple(sorted(read))
        self._echoes = dict(enumerate(echoes))
        self._delivered = 0
        self._readings = (
            []
            if tools is None
            else [_Reading(OutputCalls(tools, request.tokenizer)) for request in requests for _ in range(request.n)]
        )

    @property
    def usage(self) -> common_pb2.Usage:
        """What has been delivered."""
        prompts = sum(len(request.prompt_ids) for request in self._requests)
        return usage_to_proto(Usage(prompts, self._delivered))

    @property
    def streaming(self) -> bool:
        """A token has been delivered: from here on a failure is an event, too."""
        return self._delivered > 0

    def messages(
        self, number: int, event: Accepted | TokenBatch | HandoffRecord | Finish
    ) -> Iterator[gateway_pb2.GenerateEvent]:
        if isinstance(event, Accepted):
            yield gateway_pb2.GenerateEvent(
                accepted=accepted_to_proto(replace(event, prompt=number, read_fields=self._read))
            )
        elif isinstance(event, HandoffRecord):
            yield gateway_pb2.GenerateEvent(record=record_to_proto(event))
        else:
            yield from self._echo(number)
            choice = self._first_choice(number) + event.choice
            placed = replace(event, choice=choice) if choice != event.choice else event
            if isinstance(placed, TokenBatch):
                self._delivered += len(placed.ids)
                yield self._tokens(placed)
            else:
                yield from self._ending(placed)

    def _first_choice(self, number: int) -> int:
        return number * self._requests[number].n

    def _echo(self, number: int) -> Iterator[gateway_pb2.GenerateEvent]:
        """Before the first output of a prompt, for each of its choices."""
        text = self._echoes.pop(number, "").encode()
        first = self._first_choice(number)
        for choice in range(first, first + self._requests[number].n) if text else ():
            yield gateway_pb2.GenerateEvent(tokens=tokens_to_proto(TokenBatch(0, (), text, choice=choice)))

    def _tokens(self, batch: TokenBatch) -> gateway_pb2.GenerateEvent:
        if self._readings:
            return self._readings[batch.choice].read(batch)
        return gateway_pb2.GenerateEvent(tokens=tokens_to_proto(batch))

    def _ending(self, finish: Finish) -> Iterator[gateway_pb2.GenerateEvent]:
        if self._readings:
            reading = self._readings[finish.choice]
            yield from reading.rest(finish.choice)
            finish = replace(finish, reason=reading.calls.reason(finish.reason))
        yield gateway_pb2.GenerateEvent(finish=finish_to_proto(finish))
