"""A complete pair of workers for transfer tests: contract, numpy pages, host, both transports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from cache_transfer.codec import ITEM_BYTES
from cache_transfer.contract import (
    AttentionScheme,
    CachePlane,
    HandoffIdentity,
    PositionScheme,
    Ticket,
    WorkerContract,
    prompt_digest,
)
from cache_transfer.memory import MemoryTransport
from cache_transfer.pages import KVSource, PageSink, Range
from cache_transfer.receiver import ReceivedLogits, Receiver, ReceiveReport, ReceiverSettings
from cache_transfer.rings import Rings
from cache_transfer.sender import HandoffSender
from cache_transfer.service import TransferService, register
from cache_transfer.shared import endpoints_of
from cache_transfer.tickets import Claim, TicketBook
from cache_transfer.transport import GrpcTransport, PushStream, Transport
from pdserve.errors import PdserveError
from pdserve.rpc.channel import channel
from pdserve.rpc.server import Server
from tests.cache_transfer.pages import WAIT_S, Array, NumpySink, NumpySource
from tests.clock import Clock

INCARNATION = b"i" * 16
VOCAB = 11


def make_contract(
    *, dtype: str = "fp32", layers: int = 3, heads: int = 3, head_dim: int = 4, page_size: int = 4, order: str = "hnd"
) -> WorkerContract:
    plane_pair = (CachePlane("k", heads, head_dim), CachePlane("v", heads, head_dim))
    return WorkerContract(
        model_digest=b"m" * 32,
        positions=PositionScheme("rope", 10000.0, head_dim),
        attention=AttentionScheme(head_dim**-0.5),
        planes=(plane_pair,) * layers,
        vocab_size=VOCAB,
        tokenizer_digest=b"",
        page_size=page_size,
        page_axis_order=order,
        device="cpu",
        kv_dtype=dtype,
        weight_dtype=dtype,
        activation_dtype="float64" if dtype == "float64" else "fp32",
    )


def make_identity(contract: WorkerContract, tokens: int, start: int = 0, tenant: str = "tenant") -> HandoffIdentity:
    return HandoffIdentity(contract.digest(), None, tenant, prompt_digest(tuple(range(tokens))), start, tokens)


def random_cache(contract: WorkerContract, tokens: int, seed: int = 0) -> dict[tuple[str, int], Array]:
    """Raw bytes [tokens, heads, head_dim * itemsize] of each plane: every bit pattern may occur."""
    rng = np.random.default_rng(seed)
    item = ITEM_BYTES[contract.kv_dtype]
    return {
        (plane.name, layer): rng.integers(0, 256, (tokens, plane.heads, plane.head_dim * item), dtype=np.uint8)
        for layer, planes in enumerate(contract.planes)
        for plane in planes
    }


class GatedSink(NumpySink):
    """A sink whose writes wait for the host's `gate`; its `writing` says that one waits."""

    def __init__(self, contract: WorkerContract, tokens: int, host: Host) -> None:
        super().__init__(contract, tokens)
        self._host = host

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        self._host.writing.set()
        self._host.gate.wait(WAIT_S)
        if self._host.write_error is not None:
            raise self._host.write_error
        super().write(plane, layer, heads, tokens, payload)


@dataclass
class Host:
    """A ReceiverHost that grants numpy pages and records what it was told.

    With `gated`, writes of sinks granted from then on wait for `gate`.
    """

    contract: WorkerContract
    may_grant: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: PdserveError | None = None
    gated: bool = False
    write_error: Exception | None = None
    writing: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    sinks: dict[tuple[bytes, int], NumpySink] = field(default_factory=dict)
    done: list[tuple[Claim, ReceivedLogits, ReceiveReport]] = field(default_factory=list)
    failed: list[tuple[Claim, PdserveError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_grant.set()

    async def grant(self, claim: Claim) -> PageSink:
        self.asked.set()
        await self.may_grant.wait()
        if self.refusal is not None:
            raise self.refusal
        sink = NumpySink(self.contract, claim.end)
        if self.gated:
            sink = GatedSink(self.contract, claim.end, self)
        self.sinks[claim.handoff_id, claim.attempt] = sink
        return sink

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        self.done.append((claim, logits, report))
        self._close(claim)

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        self.failed.append((claim, error))
        self._close(claim)

    def _close(self, claim: Claim) -> None:
        sink = self.sinks.get((claim.handoff_id, claim.attempt))
        if sink is not None:
            sink.closed = True
        self.over.set()


@dataclass
class Pair:
    """A sending and a receiving worker."""

    sends: WorkerContract
    takes: WorkerContract
    host: Host
    book: TicketBook
    clock: Clock
    receiver: Receiver
    transport: Transport
    address: str = ""
    server: Server | None = None

    def issue(self, tokens: int, start: int = 0, logits_only: bool = False) -> tuple[Ticket, HandoffIdentity]:
        identity = make_identity(self.takes, tokens, start)
        return self.book.issue("request", identity, start, logits_only), identity

    def source(self, tokens: int, seed: int = 0) -> NumpySource:
        return NumpySource(self.sends, tokens).fill(random_cache(self.sends, tokens, seed))

    def sender(
        self,
        ticket: Ticket,
        identity: HandoffIdentity,
        source: KVSource,
        *,
        logits_only: bool = False,
        max_payload_bytes: int = 1 << 20,
        deadline_s: float = WAIT_S,
    ) -> HandoffSender:
        return HandoffSender(
            self.transport,
            ticket,
            identity,
            self.sends,
            source,
            logits_only=logits_only,
            max_payload_bytes=max_payload_bytes,
            deadline_s=deadline_s,
        )

    def announce_all(self, sender: HandoffSender, tokens: int) -> None:
        for layer in range(len(self.sends.planes)):
            sender.computed(layer, (0, tokens))
        sender.logits(*logits_of(self.sends), tokens - 1)

    async def check_next_handoff_works(self, tokens: int = 9) -> None:
        """Whatever happened before, a handoff on the same receiver succeeds, and nothing is left."""
        self.host.may_grant.set()
        self.host.refusal = None
        self.host.gated = False
        before = len(self.host.done)
        ticket, identity = self.issue(tokens)
        sender = self.sender(ticket, identity, self.source(tokens, seed=5))
        self.announce_all(sender, tokens)
        async with asyncio.timeout(WAIT_S):
            await sender.run()
        assert len(self.host.done) == before + 1
        check_same(self.host.sinks[ticket.handoff_id, 1].content(tokens), random_cache(self.sends, tokens, seed=5))
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        assert not any(sink.written_after_close for sink in self.host.sinks.values())
        for claim, _, _ in self.host.done:
            assert not any(claim == other for other, _ in self.host.failed)


T = TypeVar("T")


def heard(pair: Pair, kind: type[T]) -> list[T]:
    """Grows by each answer of that kind that the pair's senders get from now on."""
    found: list[T] = []
    opened = pair.transport.open

    def open_watched(deadline_s: float) -> PushStream:
        stream = opened(deadline_s)
        receive = stream.receive

        async def receiving() -> object:
            answer = await receive()
            if isinstance(answer, kind):
                found.append(answer)
            return answer

        stream.receive = receiving  # type: ignore[method-assign,assignment]
        return stream

    pair.transport.open = open_watched  # type: ignore[method-assign]
    return found


def logits_of(contract: WorkerContract, seed: int = 3) -> tuple[str, bytes]:
    dtype = "float64" if contract.activation_dtype == "float64" else "fp32"
    values = np.random.default_rng(seed).normal(size=VOCAB)
    return dtype, values.astype("<f8" if dtype == "float64" else "<f4").tobytes()


def check_same(got: dict[tuple[str, int], Array], expected: dict[tuple[str, int], Array], start: int = 0) -> None:
    """Bit for bit from token `start`; before it nothing was written."""
    assert got.keys() == expected.keys()
    for key, data in expected.items():
        assert np.array_equal(got[key][start:], data[start:]), key
        assert (got[key][:start] == 0xEE).all(), key


@asynccontextmanager
async def make_pair(
    kind: str = "grpc",
    sends: WorkerContract | None = None,
    takes: WorkerContract | None = None,
    settings: ReceiverSettings | None = None,
    **contract: int | str,
) -> AsyncIterator[Pair]:
    """`kind`: grpc, memory, or shared: gRPC with payloads in shared memory.

    By default the two sides differ in page size and axis order.
    """
    sends = sends or make_contract(**contract)  # type: ignore[arg-type]
    takes = takes or replace(sends, page_size=7, page_axis_order="nhd")
    host, clock = Host(takes), Clock()
    book = TicketBook(INCARNATION, 30.0, endpoints_of("127.0.0.1:1", "auto"), clock)
    receiver = Receiver(book, takes, host, settings)
    try:
        if kind == "memory":
            yield Pair(sends, takes, host, book, clock, receiver, MemoryTransport(receiver))
            return
        server = Server()
        server.add(register, TransferService(receiver))
        address = await server.start()
        link, rings = channel(address), Rings()
        try:
            transport = GrpcTransport(link, address, rings if kind == "shared" else None)
            yield Pair(sends, takes, host, book, clock, receiver, transport, address, server)
        finally:
            rings.close()
            await link.close()
            await server.stop()
    finally:
        receiver.close()
    assert receiver.active == 0
