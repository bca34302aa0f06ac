"""Bytes per second from prefill pages to verified decode pages, between two processes.

Payloads travel over gRPC, then through shared memory (cache_transfer/shared.py), in turn.

The peer is a bare client stream of the same frame size (bare_stream.py), with no digest and no
copy into pages. All run in turn, several times; the best of each counts, which is what the code
can do when nothing else runs; medians are printed beside it. The bound of shared memory is arithmetic,
of rates that are measured here (bounds.py): what two cores could do at most. One figure repeats the bare
stream between the transfer's own processes, where freed frames are kept (cache_transfer/allocator.py),
to show how much of the ratio is that setting. What verifying costs is measured afterwards, on the
first case; verification.py says how.

Pages are the engine's, in scattered order.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch
from blake3 import blake3

from benchmarks import bare_stream
from benchmarks.bare_stream import BareStream
from benchmarks.bounds import Costs, measure_costs
from benchmarks.report import Figure, make_parser, report
from benchmarks.transfer_cases import CASES, VOCAB, Case
from benchmarks.verification import OFF, ON, Meter, Sample
from cache_transfer.messages import MAX_PAYLOAD_BYTES
from cache_transfer.pages import KVSource, PageSink
from cache_transfer.receiver import ReceivedLogits, Receiver, ReceiveReport
from cache_transfer.rings import Rings
from cache_transfer.sender import HandoffSender, SendReport
from cache_transfer.service import TransferService, register
from cache_transfer.shared import endpoints_of
from cache_transfer.tickets import Claim, TicketBook
from cache_transfer.transport import GrpcTransport
from cache_transfer.wire import ticket_from_proto, ticket_to_proto
from pdserve.engine.cache import PagedCache
from pdserve.engine.handover import SequenceSink, SequenceSource
from pdserve.errors import PdserveError
from pdserve.rpc.channel import channel
from pdserve.rpc.server import Server
from pdserve.v1 import common_pb2

SERVICE = "pdserve.benchmark.Peer"
GOAL = 0.7
SHARED_GOAL = 2.0
VERIFICATION_GOAL = 0.3
METER = Meter()


class _Host:
    """Grants the whole pool to every handoff, one after the other."""

    def __init__(self, sink: PageSink) -> None:
        self._sink = sink

    async def grant(self, claim: Claim) -> PageSink:
        return self._sink

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        pass

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        raise error


class _Peer:
    """Beside Transfer: issues tickets, and digests the pages."""

    def __init__(self, case: Case, book: TicketBook, cache: PagedCache, pages: list[int]) -> None:
        self._case, self._book, self._cache, self._pages = case, book, cache, pages

    async def issue(self, _: bytes, context: Any) -> bytes:
        ticket = self._book.issue("benchmark", self._case.identity(), 0, False)
        return ticket_to_proto(ticket).SerializeToString()

    async def meter(self, mode: bytes, context: Any) -> bytes:
        """Sets the meter of this process, if a mode is given; the sample."""
        if mode:
            METER.set(mode)
        return METER.sample().pack()

    async def digest(self, _: bytes, context: Any) -> bytes:
        return _digest(SequenceSource(self._cache, self._pages, 0, self._case.tokens), self._case)

    def register(self, service: object, server: Any) -> None:
        handlers: dict[str, Any] = {
            "Issue": grpc.unary_unary_rpc_method_handler(self.issue),
            "Meter": grpc.unary_unary_rpc_method_handler(self.meter),
            "Digest": grpc.unary_unary_rpc_method_handler(self.digest),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _digest(source: KVSource, case: Case) -> bytes:
    """Over every plane in canonical order, whatever the pages look like."""
    hasher = blake3()
    for layer in range(case.layers):
        for plane in ("k", "v"):
            for piece in source.read(plane, layer, (0, case.heads), (0, case.tokens)):
                hasher.update(piece)
    return hasher.digest()


def serve(case: Case, pipe: Connection) -> None:
    """The receiving process: ends when the other end of `pipe` is closed."""
    torch.set_num_threads(1)
    asyncio.run(_serve(case, pipe))


async def _serve(case: Case, pipe: Connection) -> None:
    contract = case.contract(case.take_order, case.take_page_size)
    cache = PagedCache(case.spec(), case.config(case.take_order, case.take_page_size))
    pages = case.pages(case.take_page_size)
    book = TicketBook(bytes(16), 60.0, endpoints_of("127.0.0.1:1", "auto"))
    receiver = Receiver(book, contract, _Host(SequenceSink(cache, pages, 0, case.tokens)))
    server = Server()
    server.add(register, TransferService(receiver))
    peer = _Peer(case, book, cache, pages)
    server.add(peer.register, peer)
    server.add(bare_stream.register, None)
    pipe.send(await server.start())
    await asyncio.to_thread(pipe.poll, None)
    await server.stop()
    receiver.close()


async def measure(case: Case, address: str, bare: BareStream, repeats: int, verification: bool = False) -> list[Figure]:
    cache = PagedCache(case.spec(), case.config(case.send_order, 16))
    cache.storage.view(torch.int16).random_()
    source = SequenceSource(cache, case.pages(16), 0, case.tokens)
    costs = costs_of(case)
    link = channel(address)
    ours, shared, peer, tuned = Runs(), Runs(), Runs(), Runs()
    rings = Rings()  # as a worker keeps them
    for _ in range(repeats):
        seconds, sent = await push(case, link, address, source)
        ours.append(sent.payload_bytes / seconds)
        frame_bytes = sent.payload_bytes // sent.frames
        seconds, sent = await push(case, link, address, source, rings)
        shared.append(sent.payload_bytes / seconds)
        peer.append(await asyncio.to_thread(bare.measure, frame_bytes, sent.frames))
        tuned.append(await bare_stream.stream(link, frame_bytes, sent.frames))
    rings.close()
    received = await _ask(link, "Digest")
    cost = await cost_of_verification(case, link, address, source, repeats) if verification else []
    await link.close()
    if received != _digest(source, case):
        raise SystemExit("the received pages differ from the sent ones")
    return [
        Figure(f"transfer: {case.name}", ours.best, "GB/s", peer.best, GOAL),
        Figure(f"shared memory: {case.name}", shared.best, "GB/s", peer.best, SHARED_GOAL),
        Figure("- over gRPC, medians", ours.median, "GB/s", peer.median),
        Figure("- shared memory, medians", shared.median, "GB/s", peer.median),
        Figure("- shared memory, bound of two cores", costs.shared() / 1e9, "GB/s", peer.best),
        Figure("first case, bare stream keeps freed frames, too", ours.best, "GB/s", tuned.best),
        *cost,
    ]


class Runs(list[float]):
    """Bytes per second of each run; in GB/s:"""

    @property
    def best(self) -> float:
        return max(self) / 1e9

    @property
    def median(self) -> float:
        return statistics.median(self) / 1e9


def costs_of(case: Case) -> Costs:
    """On caches of their own, with the layouts of sender and receiver."""
    sends = PagedCache(case.spec(), case.config(case.send_order, 16))
    takes = PagedCache(case.spec(), case.config(case.take_order, case.take_page_size))
    source = SequenceSource(sends, case.pages(16), 0, case.tokens)
    sink = SequenceSink(takes, case.pages(case.take_page_size), 0, case.tokens)
    token = case.heads * case.head_dim * 2
    tokens = min(case.tokens, MAX_PAYLOAD_BYTES // token)
    return measure_costs(source, sink, case.layers, (0, case.heads), (0, tokens), tokens * token)


async def push(
    case: Case, link: grpc.aio.Channel, address: str, source: KVSource, rings: Rings | None = None
) -> tuple[float, SendReport]:
    """One handoff of everything: its seconds, from the first announcement to the acknowledgement.

    Args:
        rings: through shared memory; None: over gRPC.
    """
    ticket = ticket_from_proto(common_pb2.Ticket.FromString(await _ask(link, "Issue")))
    contract = case.contract(case.send_order, 16)
    transport = GrpcTransport(link, address, rings)
    sender = HandoffSender(transport, ticket, case.identity(), contract, source, logits_only=False)
    started = time.perf_counter()
    for layer in range(case.layers):
        sender.computed(layer, (0, case.tokens))
    sender.logits("fp32", bytes(4 * VOCAB), case.tokens - 1)
    sent = await sender.run()
    return time.perf_counter() - started, sent


async def cost_of_verification(
    case: Case, link: grpc.aio.Channel, address: str, source: KVSource, repeats: int
) -> list[Figure]:
    """With and without digests in turn; the best time of each, and all CPU time of those with."""
    best = {ON: float("inf"), OFF: float("inf")}
    spent = Sample(0.0, 0.0)
    for number in range(2 * repeats):
        mode = (ON, OFF)[number % 2]
        METER.set(mode)
        before = METER.sample() + Sample.unpack(await _ask(link, "Meter", mode))
        seconds, _ = await push(case, link, address, source)
        best[mode] = min(best[mode], seconds)
        if mode == ON:
            spent += METER.sample() + Sample.unpack(await _ask(link, "Meter")) - before
    METER.remove()
    return [
        Figure(
            "verification: digests of both sides, share of both processes' CPU time",
            spent.hashing / spent.process, "", goal=VERIFICATION_GOAL, at_most=True,
        ),
        Figure(
            "verification: share of the transfer's wall time that goes without digests",
            1 - best[OFF] / best[ON], "", goal=VERIFICATION_GOAL, at_most=True,
        ),
    ]  # fmt: skip


async def _ask(link: grpc.aio.Channel, method: str, request: bytes = b"") -> bytes:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = link.unary_unary(f"/{SERVICE}/{method}")
    return await call(request)


def run(case: Case, repeats: int, verification: bool = False) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(case, theirs))
    process.start()
    theirs.close()
    try:
        with BareStream() as bare:
            return asyncio.run(measure(case, ours.recv(), bare, repeats, verification))
    finally:
        ours.close()
        process.join()


def main() -> None:
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    cases, repeats = (CASES, 12) if not options.quick else (tuple(replace(c, layers=8) for c in CASES[:2]), 3)
    figures = [run(case, repeats, verification=case is cases[0]) for case in cases]
    report([*(figure for each in figures for figure in each[:5]), *figures[0][5:]], options.json)


if __name__ == "__main__":
    main()
