"""The worker under test as its clients see it: Decode, Transfer and Worker over synchronous gRPC.

Synchronous, because the asyncio client may replace a receiver's status when a write fails (see
docs/protocol.md), and the status is what is judged here.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract
from cache_transfer.transport import PUSH_METHOD
from cache_transfer.wire import contract_from_proto, contract_to_proto, identity_from_proto, ticket_from_proto
from pdserve.errors import FieldDifference, InvalidRequest, PdserveError
from pdserve.rpc.channel import sync_channel
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import difference_from_proto, from_rpc_error, has_detail
from pdserve.v1 import common_pb2, decode_pb2, decode_pb2_grpc, transfer_pb2, worker_pb2, worker_pb2_grpc

_GENERATE = "answer as in docs/protocol.md, section 2"
_ANY_SIZE = (("grpc.max_send_message_length", -1),)  # it is the worker's limit that is tried


@dataclass(frozen=True)
class Failure:
    """How a call ended other than well."""

    status: grpc.StatusCode
    error: PdserveError  # as its detail says, or what the status alone tells

    def __str__(self) -> str:
        return f"{self.status.name} {self.error.reason} ({self.error.message})"


class CallFailed(PdserveError):
    """A call of the worker under test ended with an error; `failure` has its status."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.failure = Failure(_status(error), from_rpc_error(error))
        self.detailed = has_detail(error)  # the worker said so itself
        super().__init__(self.failure.error.message, reason=self.failure.error.reason)


class _Outgoing:
    """Messages on their way to gRPC's sending thread. Unbounded: a case sends few."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, message: Any) -> None:
        self._queue.put(message)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)


class Push:
    """One Transfer/Push stream."""

    def __init__(self, link: grpc.Channel, timeout_s: float) -> None:
        self._outgoing = _Outgoing()
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = link.stream_stream(PUSH_METHOD)
        self._call: Any = method(iter(self._outgoing), timeout=timeout_s)

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self._outgoing.put(message)

    def finish(self) -> None:
        """Half-closes: nothing more will be sent."""
        self._outgoing.end()

    def receive(self) -> transfer_pb2.PushResponse | None:
        """The next answer; None at a good end. Raises CallFailed."""
        try:
            return transfer_pb2.PushResponse.FromString(next(self._call))
        except StopIteration:
            return None
        except grpc.RpcError as error:
            raise CallFailed(error) from None

    def close(self) -> None:
        """Cancels what still runs."""
        self._call.cancel()
        self._outgoing.end()


@dataclass
class Answer:
    """Everything a Decode stream said after its ticket."""

    ids: list[int] = field(default_factory=list)
    first_index: int = -1
    finish: common_pb2.Finish | None = None


class Request:
    """One Decode/Generate stream."""

    def __init__(self, peer: Peer, opening: decode_pb2.DecodeOpen | None) -> None:
        self._outgoing = _Outgoing()
        self._call: Any = peer.decode.Generate(iter(self._outgoing), timeout=peer.timeout_s)
        if opening is not None:
            self.send(open=opening)

    def send(self, **message: Any) -> None:
        self._outgoing.put(decode_pb2.DecodeRequest(**message))

    def event(self) -> decode_pb2.DecodeEvent:
        """Raises CallFailed; a stream that ends without finish counts as one."""
        try:
            event: decode_pb2.DecodeEvent = next(self._call)
        except StopIteration:
            raise InvalidRequest(
                "the stream ended without a finish", reason="STREAM_ENDED", field="finish", remedy=_GENERATE
            ) from None
        except grpc.RpcError as error:
            raise CallFailed(error) from None
        return event

    def take(self, name: str) -> Any:
        """The next event, which must be of this kind; an error event is read to its status."""
        event = self.event()
        kind = event.WhichOneof("event")
        if kind == "error" and name != "error":
            self.event()  # raises: an error event is followed by the same status
        if kind != name:
            raise InvalidRequest(
                f"{kind} came where {name} was due", reason="UNEXPECTED_EVENT", field="event", remedy=_GENERATE
            )
        return getattr(event, name)

    def ticket(self) -> Ticket:
        return ticket_from_proto(self.take("ticket"))

    def answer(self) -> Answer:
        """Reads to the finish. Raises CallFailed."""
        answer = Answer()
        while answer.finish is None:
            event = self.event()
            match event.WhichOneof("event"):
                case "tokens":
                    if answer.first_index < 0:
                        answer.first_index = event.tokens.first_index
                    if event.tokens.first_index != answer.first_index + len(answer.ids):
                        raise InvalidRequest(
                            f"tokens from {event.tokens.first_index} came after {len(answer.ids)}",
                            reason="TOKEN_INDEX",
                            field="tokens.first_index",
                            remedy="count every token once, in order",
                        )
                    answer.ids += event.tokens.ids
                case "finish":
                    answer.finish = event.finish
                case "error":
                    continue  # the status follows
                case other:
                    raise InvalidRequest(
                        f"{other} came where tokens were due",
                        reason="UNEXPECTED_EVENT",
                        field="event",
                        remedy=_GENERATE,
                    )
        return answer

    def close(self) -> None:
        """Cancels, as a caller that goes away."""
        self._call.cancel()
        self._outgoing.end()


@dataclass(frozen=True)
class Admission:
    """What the worker answers to an opening."""

    ticket: Ticket
    identity: HandoffIdentity
    contract: WorkerContract
    logits_only: bool
    conversions: tuple[FieldDifference, ...]


def admission_from_proto(proto: decode_pb2.Admitted) -> Admission:
    return Admission(
        ticket_from_proto(proto.ticket),
        identity_from_proto(proto.identity),
        contract_from_proto(proto.contract),
        proto.logits_only,
        tuple(difference_from_proto(d) for d in proto.conversions),
    )


class Peer:
    """The worker. Connects on first use.

    Args:
        address: of its Decode and Worker services.
        timeout_s: deadline of every call.
        rpc: how a router connects.
        push_rpc: how a prefill worker connects, whose certificate is another one; None: as `rpc`.
    """

    def __init__(
        self, address: str, timeout_s: float, rpc: RpcSettings | None = None, push_rpc: RpcSettings | None = None
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._push_rpc = push_rpc or rpc
        self._links = {address: sync_channel(address, rpc)}
        self.decode = decode_pb2_grpc.DecodeStub(self._links[address])
        self._worker = worker_pb2_grpc.WorkerStub(self._links[address])

    def describe(self) -> Any:
        """WorkerStatus. Raises CallFailed."""
        return self._ask(self._worker.Describe, worker_pb2.DescribeRequest())

    def accounts(self) -> worker_pb2.AccountsResponse:
        found: worker_pb2.AccountsResponse = self._ask(self._worker.Accounts, worker_pb2.AccountsRequest())
        return found

    @contextmanager
    def request(self, opening: decode_pb2.DecodeOpen | None) -> Iterator[Request]:
        """A Decode stream; cancelled at the end unless it has finished. Without an opening none is sent."""
        request = Request(self, opening)
        try:
            yield request
        finally:
            request.close()

    @contextmanager
    def push(self, ticket: Ticket, timeout_s: float = 0.0) -> Iterator[Push]:
        """A stream to the ticket's first gRPC endpoint. `timeout_s`: 0 for the usual one."""
        address = next((e.address for e in ticket.endpoints if e.transport == "grpc"), "")
        if not address:
            raise InvalidRequest(
                "the ticket names no gRPC endpoint",
                reason="NO_ENDPOINT",
                field="ticket.endpoints",
                remedy='name an address of `Push` with transport "grpc"',
            )
        if address not in self._links:
            self._links[address] = sync_channel(address, self._push_rpc, extra_options=_ANY_SIZE)
        push = Push(self._links[address], timeout_s or self.timeout_s)
        try:
            yield push
        finally:
            push.close()

    def generate_raw(self, data: bytes) -> None:
        """A Decode stream with one message of these bytes. Raises CallFailed."""
        method: Any = self._links[self.address].stream_stream("/pdserve.v1.Decode/Generate")
        try:
            next(method(iter([data]), timeout=self.timeout_s), None)
        except grpc.RpcError as error:
            raise CallFailed(error) from None

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _ask(self, call: Any, request: Any) -> Any:
        try:
            return call(request, timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise CallFailed(error) from None


def opening_for(
    contract: WorkerContract, prompt: tuple[int, ...], *, tenant: str, max_tokens: int, **fields: Any
) -> decode_pb2.DecodeOpen:
    """A greedy request that only `max_tokens` ends."""
    given = {
        "request_id": "conformance",
        "sampling": common_pb2.SamplingOptions(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True),
        **fields,
    }
    return decode_pb2.DecodeOpen(
        tenant=tenant, prompt_ids=prompt, prefill_contract=contract_to_proto(contract), **given
    )


def _status(error: grpc.RpcError) -> grpc.StatusCode:
    code = error.code() if hasattr(error, "code") else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
