"""The receiving side of handoffs: who may write which pages, from the ticket to the verified cache.

The transfer's Receiver calls `grant`, then exactly one of `verified` and `aborted`. Pages
belong to a sequence, an attempt only borrows them; they go back when its writers have drained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from cache_transfer.contract import Endpoint, Ticket, WorkerContract, arithmetic
from cache_transfer.pages import PageSink, Range
from cache_transfer.receiver import ReceivedLogits, Receiver, ReceiveReport, ReceiverSettings
from cache_transfer.tickets import Claim, TicketBook
from decode_worker.admission import expected_identity
from decode_worker.metrics import Counted
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import HANDOFF, FirstLogits, Sequence, State
from decode_worker.settings import DecodeSettings
from decode_worker.tail import Arrivals, CountingSink, Tail
from pdserve.engine.cache import PagedCache
from pdserve.engine.handover import SequenceSink
from pdserve.engine.plan import Chunk
from pdserve.errors import Fenced, PdserveError, Refused
from pdserve.telemetry.traces import OFF, Traces

log = logging.getLogger(__name__)


class Handoffs:
    """Implements `cache_transfer.receiver.ReceiverHost`. Event loop only.

    Args:
        changed: called when a sequence may compute, or may have the pages it lacks.
    """

    def __init__(
        self,
        incarnation: bytes,
        contract: WorkerContract,
        scheduler: Scheduler,
        cache: PagedCache,
        settings: DecodeSettings,
        changed: Callable[[], None],
        counted: Counted | None = None,
        traces: Traces = OFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Tickets name the Transfer listeners, which are known only once the server is bound.
        self.endpoints: tuple[Endpoint, ...] = ()
        self.book = TicketBook(incarnation, settings.ticket_ttl_s, (), clock)
        limits = ReceiverSettings(
            idle_timeout_s=settings.idle_s,
            shared_memory=settings.shared_memory != "off",
            handoff_timeout_s=min(settings.handoff_s, settings.ticket_ttl_s + settings.receive_s),
        )
        self.receiver = Receiver(self.book, contract, self, limits, traces)
        self._contract = contract
        self._scheduler = scheduler
        self._cache = cache
        self._settings = settings
        self._changed = changed
        self._counted = counted or Counted()
        self._clock = clock
        self._sequences: dict[bytes, Sequence] = {}
        self.verified_count = 0
        """Handoffs that arrived whole."""
        self.on_verified: Callable[[str, ReceivedLogits], None] = lambda key, logits: None
        """Hears of every cache that arrived whole: `pdserve verify` looks at its logits."""

    # -- towards the caller --------------------------------------------------------------------

    def open(self, sequence: Sequence) -> Ticket:
        """The first ticket of a sequence that waits."""
        sequence.arrives_by = self._clock() + self._settings.handoff_s
        sequence.identity = expected_identity(sequence.request, self._contract, sequence.cached)
        sender = arithmetic(sequence.request.prefill_contract)
        ticket = self.book.issue(sequence.key, sequence.identity, sequence.cached, sequence.logits_only, sender)
        sequence.handoff_id = ticket.handoff_id
        self._sequences[ticket.handoff_id] = sequence
        return self._issued(sequence, ticket)

    async def retry(self, sequence: Sequence) -> Ticket | None:
        """Revokes the attempt, waits for its writers, and gives the next ticket; None: the cache is complete.

        Raises Refused: TOO_MANY_ATTEMPTS, or the request is over.
        """
        if sequence.state not in HANDOFF:
            return None
        if sequence.attempts >= self._settings.max_attempts:
            raise Refused(
                f"{sequence.attempts} attempts did not bring the cache",
                reason="TOO_MANY_ATTEMPTS",
                field="decode.max_attempts",
                remedy="send a new request, or raise max_attempts",
            )
        ticket = self.book.reissue(sequence.handoff_id)
        await self.receiver.revoke(sequence.handoff_id)
        return self._issued(sequence, ticket)

    async def close(self, sequence: Sequence) -> None:
        """Ends the handoff; nothing writes to its pages once this has returned. Idempotent."""
        self.forget(sequence)
        await self.receiver.revoke(sequence.handoff_id)

    def forget(self, sequence: Sequence) -> None:
        """No attempt of this sequence may begin any more."""
        self.book.close(sequence.handoff_id)
        self._sequences.pop(sequence.handoff_id, None)

    def _issued(self, sequence: Sequence, ticket: Ticket) -> Ticket:
        sequence.attempts = ticket.attempt
        sequence.allow(self._settings.ticket_ttl_s, self._clock())
        return replace(ticket, endpoints=self.endpoints)

    # -- towards the receiver --------------------------------------------------------------------

    async def grant(self, claim: Claim) -> PageSink:
        """Waits for pages, in order; the receiver ends the wait when the ticket expires. Raises Fenced if revoked."""
        sequence = self._sequence(claim)
        if claim.logits_only:
            return NoPages()
        loop = asyncio.get_running_loop()
        granted = asyncio.Event()
        request = self._scheduler.request_grant(sequence, granted.set)
        handed_out = False
        try:
            await granted.wait()
            sink: PageSink = SequenceSink(self._cache, sequence.pages, claim.start, claim.end, claim.kv_dtype)
            if sequence.request.split and not claim.end % self._contract.page_size:
                sink = self._with_tail(sequence, claim, sink)
            handed_out = True
        finally:
            self._scheduler.withdraw(request)
            if not handed_out and sequence.pages:  # pages and the end of the wait met
                self._scheduler.ungrant(sequence)
        sequence.allow(self._settings.receive_s, self._clock())
        return FirstWrite(sink, lambda: loop.call_soon_threadsafe(_receiving, sequence))

    def _with_tail(self, sequence: Sequence, claim: Claim, sink: PageSink) -> PageSink:
        """From now on the sequence computes the end of its prompt as the beginning arrives."""
        loop = asyncio.get_running_loop()
        planes = self._contract.planes
        arrivals = Arrivals(planes, claim.end - claim.start, lambda: loop.call_soon_threadsafe(self._changed))
        ids, pages = sequence.ids, sequence.pages[: self._scheduler.blocks.pages_for(len(sequence.ids))]
        chunk = Chunk(sequence.key, ids[claim.end :], claim.end, pages, adapter=sequence.request.adapter)
        sequence.tail = Tail(chunk, arrivals, len(planes), sequence.ends_at)
        return CountingSink(sink, arrivals)

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        """Every byte is right: the sequence may compute. Raises Fenced if it was ended meanwhile."""
        sequence = self._sequence(claim)
        sequence.verified_at = time.monotonic()
        if not sequence.request.split:  # else they are of a token in the middle of the prompt
            sequence.first = FirstLogits(logits.dtype, bytes(logits.data))
        self.on_verified(sequence.key, logits)
        self.verified_count += 1
        self._counted.handed_over(report.payload_bytes + len(logits.data), report.seconds)
        self._scheduler.join(sequence)
        self._changed()

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        """The attempt is over and its writers have drained: its pages go back, a retry may follow."""
        self._counted.transfers.add(error.reason)
        sequence = self._sequences.get(claim.handoff_id)
        if sequence is None or sequence.state not in HANDOFF:
            return
        log.warning("%s: attempt %d failed: %s", sequence.key, claim.attempt, error)
        sequence.attempt_error = error
        sequence.allow(self._settings.ticket_ttl_s, self._clock())
        self._scheduler.ungrant(sequence)
        self._changed()

    def _sequence(self, claim: Claim) -> Sequence:
        sequence = self._sequences.get(claim.handoff_id)
        if sequence is None or sequence.ending is not None or not self.book.is_current(*_attempt(claim)):
            raise Fenced(
                "the request of this handoff is over",
                reason="ATTEMPT_STALE",
                field="ticket",
                remedy="send nothing more for it",
            )
        return sequence


class NoPages:
    """The sink of a handoff that brings logits only."""

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        raise Fenced("no cache was granted", reason="NO_PAGES_GRANTED", field="frame", remedy="send the logits only")


class FirstWrite:
    """A sink that tells of its first write. Worker threads may race for it: telling twice does no harm."""

    def __init__(self, sink: PageSink, tell: Callable[[], object]) -> None:
        self._sink = sink
        self._tell = tell
        self._told = False

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        if not self._told:
            self._told = True
            self._tell()
        self._sink.write(plane, layer, heads, tokens, payload)


def _receiving(sequence: Sequence) -> None:
    if sequence.state is State.GRANTED:
        sequence.move(State.RECEIVING)


def _attempt(claim: Claim) -> tuple[bytes, int]:
    return claim.handoff_id, claim.attempt
