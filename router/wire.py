"""Calls to workers as typed values: the one place where the router meets their protobuf.

A call that breaks at the transport (no detail of ours in its status) raises Unavailable with
reason WORKER_LOST, so that the caller can tell a dead worker from one that answered "no".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract
from cache_transfer.wire import (
    contract_from_proto,
    contract_to_proto,
    identity_from_proto,
    identity_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from pdserve.errors import (
    ConfigError,
    DataLoss,
    DeadlineExceeded,
    FieldDifference,
    Internal,
    InvalidRequest,
    PdserveError,
    Unavailable,
)
from pdserve.rpc.convert import finish_from_proto, sampling_to_proto, tokens_from_proto
from pdserve.rpc.events import Finish, Prefilled, TokenBatch
from pdserve.rpc.status import difference_from_proto, from_detail, from_rpc_error, has_detail, is_lost
from pdserve.rpc.writing import write
from pdserve.telemetry.context import outgoing
from pdserve.tokenizer.bundle import MAX_BUNDLE_BYTES
from pdserve.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.channels import WorkerChannels
from router.request import Request

WORKER_LOST = "WORKER_LOST"
_PREFILLED = tuple(field.name for field in decode_pb2.Prefilled.DESCRIPTOR.fields)


@dataclass(frozen=True)
class Admitted:
    """A decode worker took the request and expects this cache."""

    ticket: Ticket | None  # None: it computes the prompt itself
    identity: HandoffIdentity
    contract: WorkerContract
    logits_only: bool
    conversions: tuple[FieldDifference, ...]


@dataclass(frozen=True)
class PrefillReport:
    """A prefill worker's own account of one prompt; fields as in the wire schema's RunResponse."""

    computed_tokens: int
    cached_tokens: int
    sent_tokens: int
    bytes_sent: int
    frames_sent: int
    queued_ms: float
    prefill_ms: float
    transfer_ms: float
    push_ms: float


DecodeEvent = Admitted | Ticket | Prefilled | TokenBatch | Finish


class DecodeCall:
    """One Decode/Generate stream. An async context manager: entering connects, leaving cancels the call.

    Order: open, next -> Admitted, then next until Finish; `retry` may come between Admitted
    and the first tokens, and is answered by a Ticket, or by nothing if it asks the worker to compute
    the prompt itself. A prompt that was computed there is told of before its first tokens. A request whose
    output so far ends it already is answered by its Finish alone. Errors are typed and raised by `next`.
    """

    def __init__(self, channels: WorkerChannels, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channels = channels
        self._open = ExitStack()
        self._call: Any = None
        self._reading: asyncio.Task[DecodeEvent] | None = None

    async def __aenter__(self) -> DecodeCall:
        stub: Any = decode_pb2_grpc.DecodeStub(self._open.enter_context(connected(self._channels, self._address)))
        self._call = stub.Generate(timeout=self._timeout_s, metadata=outgoing())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call.cancel()
            if self._reading is not None:
                await settled(self._reading)
        finally:
            self._open.close()

    async def open(self, request: Request, prefill_contract: WorkerContract | None, handoff_tokens: int = 0) -> None:
        """`prefill_contract` None: the worker computes the prompt itself; `handoff_tokens`: it computes what follows
        them, 0: nothing.
        """
        opening = decode_pb2.DecodeOpen(
            request_id=request.id,
            model=request.model,
            tenant=request.tenant,
            adapter_digest=request.adapter_digest,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            forwarded_tokens=len(request.output_ids),
            sampling=sampling_to_proto(request.sampling),
            prefill_contract=None if prefill_contract is None else contract_to_proto(prefill_contract),
            prefill_here=prefill_contract is None,
            choices=[
                decode_pb2.OpenChoice(choice=c.choice, output_ids=c.output_ids, forwarded_tokens=len(c.output_ids))
                for c in request.choices
            ],
            handoff_tokens=handoff_tokens,
        )
        await self._write(decode_pb2.DecodeRequest(open=opening))

    async def retry(self, prefill_contract: WorkerContract | None) -> None:
        """Asks for the ticket of the next attempt, or (None) to compute the prompt; the current one is revoked."""
        contract = None if prefill_contract is None else contract_to_proto(prefill_contract)
        retry = decode_pb2.DecodeRetry(prefill_contract=contract, prefill_here=contract is None)
        await self._write(decode_pb2.DecodeRequest(retry=retry))

    def reading(self) -> asyncio.Task[DecodeEvent]:
        """The read in progress. Waiting for it with a timeout is safe; cancelling it ends the call."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="decode-read")
        return self._reading

    async def next(self) -> DecodeEvent:
        """The next event; cancelling this ends the call."""
        if self._reading is None:
            return await self._read()
        event = await self._reading
        self._reading = None
        return event

    async def _write(self, message: decode_pb2.DecodeRequest) -> None:
        try:
            await write(self._call, message.SerializeToString())
        except grpc.RpcError:
            return  # as when it is not sent: the call has ended, and reading raises why

    async def _read(self) -> DecodeEvent:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise call_error(error, self._address) from error
        if message is grpc.aio.EOF:
            raise lost(self._address, "the stream ended without a finish")
        return _decode_event(message)


def _decode_event(message: decode_pb2.DecodeEvent) -> DecodeEvent:
    kind = message.WhichOneof("event")
    if kind == "tokens":
        return tokens_from_proto(message.tokens)
    if kind == "finish":
        return finish_from_proto(message.finish)
    if kind == "error":
        raise from_detail(message.error)
    if kind == "prefilled":
        return Prefilled(**{name: getattr(message.prefilled, name) for name in _PREFILLED})
    try:
        if kind == "ticket":
            return ticket_from_proto(message.ticket)
        if kind == "admitted":
            return _admitted(message.admitted)
    except InvalidRequest as error:  # the worker's fault, and not that of whoever asked
        raise Internal(
            f"a decode worker sent what cannot be read: {error}", reason="MALFORMED_EVENT", retryable=True
        ) from error
    raise Internal("a decode worker sent an event of an unknown kind", reason="UNKNOWN_EVENT", retryable=True)


def _admitted(message: decode_pb2.Admitted) -> Admitted:
    return Admitted(
        ticket=None if message.prefill_here else ticket_from_proto(message.ticket),
        identity=identity_from_proto(message.identity),
        contract=contract_from_proto(message.contract),
        logits_only=message.logits_only,
        conversions=tuple(difference_from_proto(d) for d in message.conversions),
    )


async def run_prefill(
    channels: WorkerChannels, address: str, request: Request, admitted: Admitted, ticket: Ticket, timeout_s: float
) -> PrefillReport:
    """Prefill/Run: returns when decode has acknowledged. Cancelling the coroutine cancels the work."""
    run = prefill_pb2.RunRequest(
        request_id=request.id,
        model=request.model,
        tenant=request.tenant,
        adapter_digest=request.adapter_digest,
        prompt_ids=request.prompt_ids,
        output_ids=request.output_ids,
        ticket=ticket_to_proto(ticket),
        identity=identity_to_proto(admitted.identity),
        logits_only=admitted.logits_only,
        decode_contract=contract_to_proto(admitted.contract),
    )
    with connected(channels, address) as channel:
        stub: Any = prefill_pb2_grpc.PrefillStub(channel)
        try:
            r: prefill_pb2.RunResponse = await stub.Run(run, timeout=timeout_s, metadata=outgoing())
        except grpc.RpcError as error:
            raise call_error(error, address) from error
    return PrefillReport(
        computed_tokens=r.computed_tokens,
        cached_tokens=r.cached_tokens,
        sent_tokens=r.sent_tokens,
        bytes_sent=r.bytes_sent,
        frames_sent=r.frames_sent,
        queued_ms=r.queued_ms,
        prefill_ms=r.prefill_ms,
        transfer_ms=r.transfer_ms,
        push_ms=r.push_ms,
    )


async def fetch_bundle(channels: WorkerChannels, address: str, digest: bytes, timeout_s: float) -> bytes:
    """Worker/GetTokenizer: the whole bundle, not yet verified. Raises DataLoss for a wrong length."""
    data = bytearray()
    total = 0
    with connected(channels, address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        pieces: AsyncIterator[worker_pb2.BundlePiece] = stub.GetTokenizer(
            worker_pb2.GetTokenizerRequest(digest=digest), timeout=timeout_s
        )
        try:
            async for piece in pieces:
                total = piece.total_bytes
                data += piece.data
                if total > MAX_BUNDLE_BYTES or len(data) > total:
                    break
        except grpc.RpcError as error:
            raise call_error(error, address) from error
    if not data or len(data) != total:
        told = f"{address} sent {len(data)} of {total} tokenizer bytes"
        raise DataLoss(told, reason="BUNDLE_LENGTH", field="tokenizer", remedy="ask again, or see that worker's log")
    return bytes(data)


@contextmanager
def connected(channels: WorkerChannels, address: str) -> Iterator[grpc.aio.Channel]:
    """The channel for one call. Raises Unavailable for an address that this router cannot or may not connect to."""
    try:
        with channels.use(address) as channel:
            yield channel
    except ConfigError as error:  # of this one worker: others may well be reachable
        raise lost(address, str(error)) from error


def call_error(error: grpc.RpcError, address: str) -> PdserveError:
    """The typed error; WORKER_LOST when the worker itself did not say why."""
    if is_lost(error):
        return lost(address, str(from_rpc_error(error)))
    found = from_rpc_error(error, address)
    if isinstance(found, DeadlineExceeded) and not has_detail(error):
        told = f"{address} did not finish within the request's deadline"
        return DeadlineExceeded(told, field="deadline", remedy="allow more time, or ask for fewer tokens")
    return found


def lost(address: str, why: str) -> Unavailable:
    return Unavailable(
        f"the worker at {address} was lost: {why}", reason=WORKER_LOST, field="worker", remedy="send the request again"
    )


async def settled(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it is over; its outcome is of no use any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
