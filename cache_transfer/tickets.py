"""Tickets: who may write a cache here, once, and until when.

A handoff has one entry here from `issue` to `close`, and at most one current attempt:

    issue --> OPEN --claim--> CLAIMED --close--> gone
               |  \\              |
               |   reissue       reissue        both: attempt + 1 is OPEN, the old one is stale
               v
             expired: refused from then on; who issued it has a deadline of its own, and closes it

All methods run on one event loop and never wait, so each is one atomic step: after `reissue`
or `close` returns, `claim` and `is_current` refuse the old attempt.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_transfer.contract import Endpoint, HandoffIdentity, Ticket, WorkerContract
from cache_transfer.messages import PushOpening
from cache_transfer.opening import Due, Numerics, check_opening
from pdserve.errors import Fenced, FieldDifference, Internal, PdserveError, Refused

log = logging.getLogger(__name__)

HANDOFF_ID_BYTES = 16
SECRET_BYTES = 32
_NEW_TICKET = "ask for a new ticket"


@dataclass(frozen=True)
class Claim:
    """The right to write one cache. `start` and `end` are the tokens that travel."""

    request_id: str
    handoff_id: bytes
    attempt: int
    identity: HandoffIdentity
    logits_only: bool
    expires_at: float  # seconds on the book's clock
    conversions: tuple[FieldDifference, ...]  # what differs and is converted on receipt
    kv_dtype: str  # of the frames; the sink converts when the receiver's is another
    secret: bytes = field(repr=False)

    @property
    def start(self) -> int:
        return self.identity.end if self.logits_only else self.identity.start

    @property
    def end(self) -> int:
        return self.identity.end


@dataclass
class _Entry:
    request_id: str
    ticket: Ticket
    expected: HandoffIdentity
    logits_only: bool
    expires_at: float
    announced: Numerics | None  # numerics of the sender
    claimed: bool = False


class TicketBook:
    """The tickets of one decode worker.

    Args:
        incarnation: the worker's boot id, 16 bytes.
        ttl_s: seconds from issue until a ticket can no longer be claimed.
        endpoints: Transfer listeners that tickets name.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        incarnation: bytes,
        ttl_s: float,
        endpoints: Sequence[Endpoint],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.incarnation = incarnation
        self.clock = clock
        self._ttl_s = ttl_s
        self._endpoints = tuple(endpoints)
        self._entries: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        """Handoffs that were issued and not closed."""
        return len(self._entries)

    def issue(
        self,
        request_id: str,
        expected: HandoffIdentity,
        held_tokens: int,
        logits_only: bool,
        announced: Numerics | None = None,
    ) -> Ticket:
        """The first ticket of a new handoff.

        Args:
            expected: the identity that the sender must state. Its range starts at `held_tokens`.
            held_tokens: prompt tokens [0, held_tokens) that are already here.
            logits_only: no cache travels; `held_tokens` may then differ from the range's start.
            announced: the numerics that the sender was announced with; None: any that are compatible.
        """
        handoff_id = secrets.token_bytes(HANDOFF_ID_BYTES)
        return self._enter(request_id, handoff_id, 1, expected, held_tokens, logits_only, announced)

    def reissue(self, handoff_id: bytes) -> Ticket:
        """The next attempt at the same cache; the current one is stale from now on.

        Pages of the old attempt are free only after `Receiver.revoke` returned.
        Raises Refused (TICKET_UNKNOWN) when the handoff was closed.
        """
        old = self._entries.get(handoff_id)
        if old is None:
            raise Refused(
                "this handoff is over", reason="TICKET_UNKNOWN", field="handoff_id", remedy="start a new request"
            )
        return self._enter(
            old.request_id,
            handoff_id,
            old.ticket.attempt + 1,
            old.expected,
            old.ticket.held_tokens,
            old.logits_only,
            old.announced,
        )

    def claim(self, opening: PushOpening, contract: WorkerContract) -> Claim:
        """Spends the ticket that `opening` names, or leaves it untouched and raises.

        Args:
            contract: the receiver's own.

        Raises:
            Fenced: INCARNATION, ATTEMPT_STALE, TICKET_USED.
            Refused: TICKET_UNKNOWN, TICKET_EXPIRED.
            PdserveError: what `opening.check_opening` raises.
        """
        try:
            entry = self._find(opening)
            due = Due(entry.expected, entry.logits_only, entry.announced, entry.ticket.secret)
            conversions = check_opening(opening, due, contract)
        except PdserveError as error:
            log.warning(
                "push refused: handoff %s attempt %d: %s: %s",
                opening.handoff_id.hex()[:32],
                opening.attempt,
                error.reason,
                error,
            )
            raise
        entry.claimed = True
        return Claim(
            request_id=entry.request_id,
            handoff_id=opening.handoff_id,
            attempt=opening.attempt,
            identity=entry.expected,
            logits_only=entry.logits_only,
            expires_at=entry.expires_at,
            conversions=conversions,
            kv_dtype=opening.kv_dtype,
            secret=entry.ticket.secret,
        )

    def is_current(self, handoff_id: bytes, attempt: int) -> bool:
        entry = self._entries.get(handoff_id)
        return entry is not None and entry.ticket.attempt == attempt

    def close(self, handoff_id: bytes) -> None:
        """Forgets the handoff; every attempt of it is refused from now on. Idempotent."""
        self._entries.pop(handoff_id, None)

    def _enter(
        self,
        request_id: str,
        handoff_id: bytes,
        attempt: int,
        expected: HandoffIdentity,
        held_tokens: int,
        logits_only: bool,
        announced: Numerics | None,
    ) -> Ticket:
        if not logits_only and expected.start != held_tokens:
            raise Internal(
                f"a ticket for tokens [{expected.start}, {expected.end}) with {held_tokens} tokens held",
                field="held_tokens",
            )
        ticket = Ticket(
            handoff_id=handoff_id,
            attempt=attempt,
            incarnation=self.incarnation,
            secret=secrets.token_bytes(SECRET_BYTES),
            ttl_ms=max(1, round(self._ttl_s * 1000)),
            held_tokens=held_tokens,
            endpoints=self._endpoints,
        )
        expires_at = self.clock() + self._ttl_s
        self._entries[handoff_id] = _Entry(request_id, ticket, expected, logits_only, expires_at, announced)
        return ticket

    def _find(self, opening: PushOpening) -> _Entry:
        """The entry whose current, unclaimed, unexpired ticket the opening names."""
        if opening.incarnation != self.incarnation:
            raise _fenced("the ticket is of another start of this worker", "INCARNATION", "incarnation")
        entry = self._entries.get(opening.handoff_id)
        if entry is None or opening.attempt > entry.ticket.attempt:
            raise Refused("no such ticket", reason="TICKET_UNKNOWN", field="handoff_id", remedy=_NEW_TICKET)
        if opening.attempt < entry.ticket.attempt:
            stale = f"attempt {opening.attempt} was replaced by attempt {entry.ticket.attempt}"
            raise _fenced(stale, "ATTEMPT_STALE", "attempt")
        if entry.claimed:
            raise _fenced("the ticket was claimed before", "TICKET_USED", "attempt")
        if self.clock() >= entry.expires_at:
            raise Refused("the ticket has expired", reason="TICKET_EXPIRED", field="ttl_ms", remedy=_NEW_TICKET)
        return entry


def _fenced(problem: str, reason: str, field: str) -> Fenced:
    return Fenced(problem, reason=reason, field=field, remedy=_NEW_TICKET)
