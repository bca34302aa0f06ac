"""What a decode worker must refuse, survive or clean up after. Nothing of it may ever be sampled.

Every hostile stream is followed on the same request by a right one whose logits choose another
token: that token must come first. So a case shows three things: the refusal is as documented,
nothing of the refused stream was used, and the worker goes on serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from pdserve.conformance.bench import Bench, expect, fail, refuses, skip
from pdserve.conformance.cases import Case
from pdserve.conformance.catalogue import hostile_streams
from pdserve.conformance.hostile import Hostile, flip
from pdserve.conformance.peer import CallFailed

_S = grpc.StatusCode


def cases() -> Iterator[Case]:
    for each in hostile_streams():
        yield Case(each.name, each.group, lambda bench, each=each: _stream(bench, each), hostile=True)  # type: ignore[misc]
    for name, run in _CASES.items():
        yield Case(name, "tickets", run, hostile=True)


def _stream(bench: Bench, each: Hostile) -> None:
    first = bench.token()
    with bench.handoff() as handoff:
        messages = each.make(handoff.draft(bench.other_token(first)))
        bench.refused(handoff.admission.ticket, messages, each.reasons, each.differences)
        # A refused claim leaves the ticket as it was, so the same one still serves.
        ticket = handoff.retry() if each.claims else handoff.admission.ticket
        handoff.complete(first, ticket)


def _replayed(bench: Bench) -> None:
    """The same stream again: while the request runs, and after it."""
    first = bench.token()
    with bench.handoff(max_tokens=4) as handoff:
        draft = handoff.draft(first)
        bench.push(draft)
        bench.refused(draft.ticket, draft.messages(), ("TICKET_USED", "TICKET_UNKNOWN"))
        handoff.finish(first)
    bench.settle()
    bench.refused(draft.ticket, draft.messages(), ("TICKET_UNKNOWN",))


def _replayed_while_open(bench: Bench) -> None:
    """A second stream with the ticket of one that is being received."""
    first = bench.token()
    with bench.handoff() as handoff:
        draft = handoff.draft(first)
        messages = draft.messages()
        with bench.peer.push(draft.ticket) as push:
            bench.granted(push, messages[0], draft)
            push.send(messages[1])
            thief = handoff.draft(bench.other_token(first))
            bench.refused(thief.ticket, thief.messages(), ("TICKET_USED",))
            push.send(*messages[2:])
            push.finish()
            bench.acknowledged(push, draft)
        handoff.finish(first)


def _failed_then_retried(bench: Bench) -> None:
    first = bench.token()
    with bench.handoff() as handoff:
        old = handoff.admission.ticket
        broken = handoff.draft(bench.other_token(first)).messages()
        broken[1] = flip(broken[1], 8 * (len(broken[1]) - 1))
        bench.refused(old, broken, ("FRAME_DIGEST",))
        bench.refused(old, broken, ("TICKET_USED",))
        ticket = handoff.retry()
        expect(ticket.attempt == old.attempt + 1, f"attempt {old.attempt} is followed by {ticket.attempt}")
        expect(ticket.secret != old.secret, "two attempts have one secret")
        bench.refused(old, handoff.draft(first, old).messages(), ("ATTEMPT_STALE",))
        handoff.complete(first, ticket)


def _retried_before_any_push(bench: Bench) -> None:
    first = bench.token()
    with bench.handoff() as handoff:
        old, ticket = handoff.admission.ticket, handoff.retry()
        bench.refused(old, handoff.draft(bench.other_token(first), old).messages(), ("ATTEMPT_STALE",))
        handoff.complete(first, ticket)


def _retried_while_receiving(bench: Bench) -> None:
    """The stream of the attempt before ends, whatever it still sends."""
    first = bench.token()
    with bench.handoff() as handoff:
        old = handoff.draft(bench.other_token(first))
        messages = old.messages()
        bench.hostile_inputs += 1
        with bench.peer.push(old.ticket) as push:
            bench.granted(push, messages[0], old)
            push.send(messages[1])
            ticket = handoff.retry()
            push.send(*messages[2:])
            push.finish()
            try:
                answer = push.receive()
                fail(f"the stream of the attempt before went on: {answer}")
            except CallFailed as failed:
                expect(failed.reason == "ATTEMPT_STALE", f"it ended with {failed.failure}, not ATTEMPT_STALE")
        handoff.complete(first, ticket)


def _ticket_of_another_request(bench: Bench) -> None:
    """A ticket with the cache, and the tenant, of another request."""
    first, second = bench.token(), bench.token()
    with bench.handoff() as mine, bench.handoff() as theirs:
        stolen = theirs.admission.ticket
        draft = mine.draft(bench.other_token(second), stolen)
        bench.refused(stolen, draft.messages(), ("IDENTITY_MISMATCH",), ("IDENTITY.tenant", "IDENTITY.prompt_digest"))
        mine.complete(first)
        theirs.complete(second)


def _frame_of_another_request(bench: Bench) -> None:
    """A frame that was right on another stream at the same place."""
    first, second = bench.token(), bench.token()
    with bench.handoff(seed=1) as mine, bench.handoff(seed=2) as theirs:
        messages = mine.draft(first).messages()
        messages[1] = theirs.draft(second).messages()[1]
        bench.refused(mine.admission.ticket, messages, ("FRAME_DIGEST",))
        mine.complete(first, mine.retry())
        theirs.complete(second)


def _ticket_of_an_ended_request(bench: Bench) -> None:
    with bench.handoff() as handoff:
        draft = handoff.draft(bench.token())
    bench.settle()
    bench.refused(draft.ticket, draft.messages(), ("TICKET_UNKNOWN",))


def _expired(bench: Bench) -> None:
    with bench.handoff() as handoff:
        ticket = handoff.admission.ticket
        if ticket.ttl_ms > 1000 * bench.limits.wait_s:
            skip(f"tickets live for {ticket.ttl_ms / 1000:g} s; allow it with --wait")
        refuses(handoff.request.answer, _S.DEADLINE_EXCEEDED, "TICKET_EXPIRED")
        draft = handoff.draft(bench.token())
        bench.refused(ticket, draft.messages(), ("TICKET_EXPIRED", "TICKET_UNKNOWN"))


_CASES: dict[str, Callable[[Bench], None]] = {
    "a ticket is used twice": _replayed,
    "a ticket is used while its stream is open": _replayed_while_open,
    "a failed attempt, its old ticket, and the next attempt": _failed_then_retried,
    "a ticket that was replaced before any push": _retried_before_any_push,
    "a ticket that is replaced while its cache arrives": _retried_while_receiving,
    "a ticket of another request": _ticket_of_another_request,
    "a frame of another request": _frame_of_another_request,
    "a ticket of a request that has ended": _ticket_of_an_ended_request,
    "an expired ticket": _expired,
}
