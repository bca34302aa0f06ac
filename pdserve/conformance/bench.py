"""The bench: the worker under test, requests that it admitted, and what cases may expect of it."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from cache_transfer.contract import Ticket, WorkerContract
from cache_transfer.wire import contract_from_proto, contract_to_proto, ticket_from_proto
from pdserve.conformance.peer import (
    Admission,
    Answer,
    CallFailed,
    Failure,
    Peer,
    Push,
    Request,
    admission_from_proto,
    opening_for,
)
from pdserve.conformance.reasons import PUSH_REASONS
from pdserve.conformance.streams import Cache, Draft, make_cache, make_draft, make_scores
from pdserve.errors import PdserveError
from pdserve.v1 import decode_pb2, transfer_pb2

BEST = 9.0  # score of the token that must be chosen; all others are below 1


class CaseFailed(PdserveError):
    """The worker did not do what docs/protocol.md says."""


class CaseSkipped(PdserveError):
    """The case does not apply to this worker, or would take longer than allowed."""


@dataclass(frozen=True)
class Limits:
    timeout_s: float = 30.0
    """Deadline of every call."""

    settle_s: float = 5.0
    """Pages must be back this soon after a case."""

    wait_s: float = 0.0
    """Longest that a case may wait for one of the worker's own time limits; 0: such cases are skipped."""


@dataclass
class Handoff:
    """One admitted request and what a prefill worker would know of it."""

    bench: Bench
    request: Request
    prompt: tuple[int, ...]
    admission: Admission
    contract: WorkerContract  # the sender's
    cache: Cache

    def draft(self, first: int, ticket: Ticket | None = None, **options: Any) -> Draft:
        """A right stream whose logits choose the token `first`."""
        scores = make_scores(self.contract, options.pop("best", {first: BEST}))
        given = {"logits_only": self.admission.logits_only, **options}
        identity = self.admission.identity
        return make_draft(ticket or self.admission.ticket, identity, self.contract, self.cache, scores, **given)

    def retry(self) -> Ticket:
        """The next attempt's ticket. A token that comes first was sampled from nothing that was acknowledged."""
        self.request.send(retry=self.bench.retry_of(self.contract))
        event = self.request.event()
        kind = event.WhichOneof("event")
        if kind in ("tokens", "finish"):
            fail("a token was sampled from a handoff that was not acknowledged")
        if kind != "ticket":
            fail(f"{kind} came where a new ticket was due")
        ticket = _ticket(event)
        if ticket.handoff_id != self.admission.ticket.handoff_id:
            fail("the next attempt has another handoff id")
        return ticket

    def complete(self, first: int, ticket: Ticket | None = None, **options: Any) -> Answer:
        """Pushes a right stream and reads the answer, whose first token must be `first`."""
        self.bench.push(self.draft(first, ticket, **options))
        return self.finish(first)

    def finish(self, first: int) -> Answer:
        answer = self.request.answer()
        if not answer.ids or answer.ids[0] != first:
            fail(f"the first token is {answer.ids[:1]}, the logits say {first}")
        if not all(0 <= token < self.contract.vocab_size for token in answer.ids):
            fail(f"tokens outside the vocabulary: {answer.ids}")
        return answer


@dataclass
class Bench:
    """The worker under test, and what cases need to drive it."""

    peer: Peer
    limits: Limits
    contract: WorkerContract
    model: str
    hostile_inputs: int = 0
    _run: str = field(default_factory=lambda: secrets.token_hex(4))
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _requests: int = 0

    @classmethod
    def connect(cls, peer: Peer, limits: Limits) -> Bench:
        """Raises CallFailed, and InvalidRequest for a contract that is malformed."""
        status = peer.describe()
        return cls(peer, limits, contract_from_proto(status.contract), status.model)

    # -- making requests -------------------------------------------------------------------------------

    def tenant(self) -> str:
        """A tenant of its own for each request, so that none finds the prefix of another."""
        self._requests += 1
        return f"conformance-{self._run}-{self._requests}"

    def prompt(self, length: int = 0) -> tuple[int, ...]:
        """Ids anywhere in the vocabulary; by default a little more than a page, at most 20."""
        limit = self.contract.context_limit or 1 << 30
        length = min(length or max(4, min(self.contract.page_size + 3, 20)), limit - 8)
        if length < 1:
            skip(f"the context of {limit} tokens is too short")
        return self.ids(length)

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(self.contract.vocab_size) for _ in range(count))

    def retry_of(self, contract: WorkerContract) -> decode_pb2.DecodeRetry:
        """Asks for the next attempt, by a sender of this contract."""
        return decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(contract))

    def token(self) -> int:
        """A first token that a case may ask for."""
        return self._draw.randrange(self.contract.vocab_size)

    def other_token(self, than: int) -> int:
        return (than + 1 + self._draw.randrange(self.contract.vocab_size - 1)) % self.contract.vocab_size

    @contextmanager
    def handoff(
        self,
        prompt: Sequence[int] = (),
        *,
        max_tokens: int = 2,
        tenant: str = "",
        contract: WorkerContract | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> Iterator[Handoff]:
        """An admitted request; cancelled at the end if it has not finished."""
        ids, sender = tuple(prompt) or self.prompt(), contract or self.contract
        opening = opening_for(sender, ids, tenant=tenant or self.tenant(), max_tokens=max_tokens, **fields)
        with self.peer.request(opening) as request:
            admission = admission_from_proto(request.take("admitted"))
            every = ids + tuple(opening.output_ids)
            yield Handoff(self, request, every, admission, sender, make_cache(sender, len(every), seed))

    # -- pushing ---------------------------------------------------------------------------------------

    def push(self, draft: Draft) -> None:
        """Sends a right stream and takes its acknowledgement."""
        messages = draft.messages()
        with self.peer.push(draft.ticket) as push:
            self.granted(push, messages[0], draft)
            push.send(*messages[1:])
            push.finish()
            self.acknowledged(push, draft)

    def granted(self, push: Push, opening: bytes, draft: Draft) -> transfer_pb2.Grant:
        """Opens the stream, and checks and returns the grant."""
        push.send(opening)
        answer = push.receive()
        if answer is None or not answer.HasField("grant"):
            fail(f"{'the end' if answer is None else 'an acknowledgement'} came where a grant was due")
        start = draft.identity.end if draft.opening.logits_only else draft.identity.start
        if (answer.grant.start, answer.grant.end) != (start, draft.identity.end):
            fail(f"tokens [{answer.grant.start}, {answer.grant.end}) were granted, not [{start}, {draft.identity.end})")
        if any(len(frame.payload) > answer.grant.max_payload_bytes for frame in draft.frames):
            skip(f"frames of {answer.grant.max_payload_bytes} bytes are too small for this case")
        return answer.grant

    def acknowledged(self, push: Push, draft: Draft) -> None:
        answer = push.receive()
        if answer is None or not answer.HasField("ack"):
            fail("the stream ended without an acknowledgement")
        sent = (len(draft.frames), sum(len(frame.payload) for frame in draft.frames))
        if (answer.ack.frames, answer.ack.payload_bytes) != sent:
            fail(f"acknowledged were {answer.ack.frames} frames, {answer.ack.payload_bytes} bytes; sent were {sent}")
        if push.receive() is not None:
            fail("a message came after the acknowledgement")

    def refused(
        self,
        ticket: Ticket,
        messages: Sequence[bytes],
        reasons: Sequence[str],
        differences: Sequence[str] = (),
    ) -> None:
        """Sends a hostile stream and checks how it is refused: status, reason, retryability, differences.

        Messages after the first wait for the grant, if one comes.
        """
        self.hostile_inputs += 1
        with self.peer.push(ticket) as push:
            push.send(*messages[:1])
            if len(messages) < 2:
                push.finish()
            try:
                answer = push.receive()
                if answer is not None and answer.HasField("grant"):
                    push.send(*messages[1:])
                    push.finish()
                    answer = push.receive()
            except CallFailed as failed:
                self.check_failure(failed.failure, reasons, differences)
                return
        fail(f"it was {'acknowledged' if answer is not None else 'ended with OK'}, where {_any(reasons)} was due")

    def check_failure(self, failure: Failure, reasons: Sequence[str], differences: Sequence[str] = ()) -> None:
        """Status, reason, retryability and differences of a refused push."""
        error = failure.error
        if error.reason not in reasons:
            fail(f"refused with {failure}, where {_any(reasons)} was due")
        status, retryable = PUSH_REASONS[error.reason]
        if failure.status is not status:
            fail(f"{error.reason} came with {failure.status.name}, not {status.name}")
        if error.retryable != retryable:
            fail(f"{error.reason} says retryable {error.retryable}, not {retryable}")
        missing = set(differences) - {difference.code for difference in error.differences}
        if missing:
            fail(f"{error.reason} does not name {', '.join(sorted(missing))}")

    # -- accounts ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits until the worker holds no page; each look is a whole call. Fails after `settle_s`."""
        until = time.monotonic() + self.limits.settle_s
        while True:
            accounts = self.peer.accounts()
            if not accounts.intact:
                fail(f"the page books are not intact: {accounts.fault}")
            if accounts.pages_held == 0 and not accounts.holdings:
                return
            if time.monotonic() > until:
                holding = ", ".join(f"{h.kind} {h.owner} ({h.pages})" for h in accounts.holdings)
                fail(f"{accounts.pages_held} pages are still held after {self.limits.settle_s:g} s: {holding}")


def fail(problem: str) -> NoReturn:
    raise CaseFailed(problem)


def skip(why: str) -> NoReturn:
    raise CaseSkipped(why)


def expect(holds: bool, problem: str) -> None:
    if not holds:
        fail(problem)


def refuses(call: Callable[[], object], status: grpc.StatusCode, reason: str, field: str = "") -> Failure:
    """Runs a Decode call that must be refused so; `reason` may name several, with a bar between them."""
    try:
        call()
    except CallFailed as failed:
        found = failed.failure
        right = found.status is status and found.error.reason in reason.split("|")
        if not right or (field and found.error.field != field):
            fail(f"refused with {found}, field {found.error.field!r}; {status.name} {reason} {field} was due")
        return found
    fail(f"it was accepted, where {reason} was due")


def _ticket(event: decode_pb2.DecodeEvent) -> Ticket:
    return ticket_from_proto(event.ticket)


def _any(reasons: Sequence[str]) -> str:
    return " or ".join(reasons)
