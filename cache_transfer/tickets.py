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

from cache_transfer import digests
from cache_transfer.contract import (
    LOSSY,
    Endpoint,
    HandoffIdentity,
    Ticket,
    WorkerContract,
    check_compatible,
    check_identity,
    numerics,
)
from cache_transfer.messages import INTEGRITY, PushOpening
from pdserve.errors import (
    DataLoss,
    Fenced,
    FieldDifference,
    Incompatible,
    Internal,
    InvalidRequest,
    PdserveError,
    Refused,
)

log = logging.getLogger(__name__)

HANDOFF_ID_BYTES = 16
SECRET_BYTES = 32
_NEW_TICKET = "ask for a new ticket"

Numerics = tuple[tuple[str, str], ...]  # of contract.numerics


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
            DataLoss: PROOF, the sender does not hold the secret or stated another identity.
            Incompatible: CONTRACT_MISMATCH, IDENTITY_MISMATCH, KV_DTYPE, with the differences.
            InvalidRequest: INTEGRITY, LOGITS_ONLY.
        """
        try:
            entry = self._find(opening)
            conversions = _check_opening(opening, entry, contract)
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


def make_opening(
    ticket: Ticket, identity: HandoffIdentity, contract: WorkerContract, *, logits_only: bool
) -> PushOpening:
    """What a holder of the ticket sends first."""
    return PushOpening(
        handoff_id=ticket.handoff_id,
        attempt=ticket.attempt,
        incarnation=ticket.incarnation,
        proof=digests.proof(ticket.secret, identity),
        identity=identity,
        contract=contract,
        kv_dtype=contract.kv_dtype,
        logits_only=logits_only,
    )


def _check_opening(opening: PushOpening, entry: _Entry, contract: WorkerContract) -> tuple[FieldDifference, ...]:
    """Returns the differences that are converted. The order puts the most telling error first."""
    if not digests.same(digests.proof(entry.ticket.secret, opening.identity), opening.proof):
        raise DataLoss(
            "the sender's proof does not match its ticket and identity",
            reason="PROOF",
            field="proof",
            remedy="prove the ticket's own secret over the identity that is sent",
            retryable=False,
        )
    if opening.integrity != INTEGRITY:
        raise InvalidRequest(
            f"{opening.integrity[:32]!r} is not known", reason="INTEGRITY", field="integrity", remedy=f"use {INTEGRITY}"
        )
    conversions = check_compatible(opening.contract, contract)
    _check_numerics(entry.announced, opening.contract)
    check_identity(entry.expected, opening.identity)
    if opening.kv_dtype != opening.contract.kv_dtype:
        difference = FieldDifference("KV_DTYPE", opening.kv_dtype[:32], opening.contract.kv_dtype)
        raise Incompatible(
            f"the frames' dtype is not the contract's: {difference}",
            reason="KV_DTYPE",
            field="kv_dtype",
            differences=(difference,),
        )
    if opening.logits_only != entry.logits_only:
        raise InvalidRequest(
            f"the ticket is for {'logits only' if entry.logits_only else 'a cache'}",
            reason="LOGITS_ONLY",
            field="logits_only",
            remedy="open the push as the ticket's request says",
        )
    return conversions


def _check_numerics(announced: Numerics | None, sender: WorkerContract) -> None:
    """The request was admitted, and its conversions reported, for a sender of these numerics."""
    if announced is None:
        return
    pairs = zip(numerics(sender), announced, strict=True)
    found = tuple(FieldDifference(code, got, was, LOSSY) for (code, got), (_, was) in pairs if got != was)
    if found:
        raise Incompatible(
            f"the sender is not the one that was announced: {found[0]}",
            field=found[0].code,
            remedy="name the sending worker's own contract in Decode/Generate",
            differences=found,
        )
