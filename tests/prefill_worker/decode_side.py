"""A decode side of its own for a prefill worker's tests: tickets, receiver, pages, Transfer server."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cache_transfer.contract import Endpoint, HandoffIdentity, Ticket, WorkerContract, prompt_digest
from cache_transfer.pages import PageSink, Range
from cache_transfer.receiver import ReceivedLogits, Receiver, ReceiveReport, ReceiverSettings
from cache_transfer.service import TransferService
from cache_transfer.service import register as register_transfer
from cache_transfer.tickets import Claim, TicketBook
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.handover import SequenceSink
from pdserve.errors import PdserveError
from pdserve.rpc.server import Server

WAIT_S = 10.0


@dataclass
class Received:
    """A cache that arrived whole."""

    pages: tuple[int, ...]
    logits: ReceivedLogits
    report: ReceiveReport


class GatedSink:
    """Stops before the first write until `gate` is set; `reached` says that it has stopped."""

    def __init__(self, sink: PageSink, reached: Callable[[], None], gate: threading.Event) -> None:
        self._sink, self._reached, self._gate = sink, reached, gate

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        self._reached()
        assert self._gate.wait(WAIT_S)
        self._sink.write(plane, layer, heads, tokens, payload)


class DecodeSide:
    """Implements ReceiverHost over an engine's cache; page size and axis order are its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.contract: WorkerContract = engine.contract()
        self.blocks = BlockManager(engine.config.pages, engine.config.page_size)
        self.book = TicketBook(secrets.token_bytes(16), 30.0, ())
        self.receiver = Receiver(self.book, self.contract, self, ReceiverSettings(threads=1))
        self.server = Server()
        self.server.add(register_transfer, TransferService(self.receiver))
        self.received: dict[bytes, Received] = {}
        self.aborts: list[PdserveError] = []
        self.refusal: PdserveError | None = None  # raised instead of granting
        self.granting = asyncio.Event()  # a push asks for pages
        self.may_grant = asyncio.Event()
        self.may_grant.set()
        self.writing = asyncio.Event()  # a frame is about to be written
        self.may_write = threading.Event()
        self.may_write.set()
        self._pages: dict[bytes, tuple[int, ...]] = {}

    async def start(self) -> None:
        self.book._endpoints = (Endpoint(await self.server.start()),)

    async def stop(self) -> None:
        self.may_grant.set()
        self.may_write.set()
        await self.server.stop()
        await asyncio.to_thread(self.receiver.close)

    def ticket(
        self, ids: Sequence[int], tenant: str = "t", *, held: int = 0, logits_only: bool = False
    ) -> tuple[Ticket, HandoffIdentity]:
        digest = prompt_digest(tuple(ids))
        identity = HandoffIdentity(self.contract.digest(), None, tenant, digest, held, len(ids))
        return self.book.issue("r", identity, held, logits_only), identity

    async def grant(self, claim: Claim) -> PageSink:
        self.granting.set()
        await self.may_grant.wait()
        if self.refusal is not None:
            raise self.refusal
        owner = claim.handoff_id.hex()
        pages = () if claim.logits_only else self.blocks.allocate(owner, self.blocks.pages_for(claim.end))
        self._pages[claim.handoff_id] = pages
        sink = SequenceSink(self.engine.cache, pages, *((0, 0) if claim.logits_only else (claim.start, claim.end)))
        loop = asyncio.get_running_loop()

        def reached() -> None:
            loop.call_soon_threadsafe(self.writing.set)

        return GatedSink(sink, reached, self.may_write)

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        self.received[claim.handoff_id] = Received(self._pages[claim.handoff_id], logits, report)

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        self.blocks.release(claim.handoff_id.hex())
        self.aborts.append(error)

    def cache(self, handoff_id: bytes, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, length, d] as they arrived."""
        return self.engine.cache.sequence(layer, self.received[handoff_id].pages, length)
