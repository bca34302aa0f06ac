"""Pushes that have to wait for their grant, since other handoffs hold the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from cache_transfer.contract import Ticket
from pdserve.conformance.bench import Bench, fail, skip
from pdserve.conformance.cases import Case
from pdserve.conformance.peer import Admission, CallFailed, Request, admission_from_proto, opening_for
from pdserve.conformance.streams import FrameDraft, make_opening
from pdserve.v1 import transfer_pb2 as pb

MOST_HOLDERS = 32
OUTPUT = 2


def cases() -> Iterator[Case]:
    for name, run in _CASES.items():
        yield Case(name, "order", run, hostile=True)


def _frame(bench: Bench) -> None:
    frame = FrameDraft({"plane": "k"}, bytes(16))
    early = pb.PushRequest(frame=pb.Frame(header=frame.packed(), payload=frame.payload, digest=bytes(32)))
    _refused(bench, early.SerializeToString(), "MESSAGE_ORDER")


def _end(bench: Bench) -> None:
    _refused(bench, b"", "SENDER_GONE")


def _refused(bench: Bench, early: bytes, reason: str) -> None:
    """The stream ends while no page is there for it; the request goes on, and so does its next attempt."""
    with _waiting(bench) as (request, admission):
        _speak(bench, admission, admission.ticket, early, reason)
        request.send(retry=bench.retry_of(bench.contract))
        _speak(bench, admission, request.ticket(), early, reason)


def _speak(bench: Bench, admission: Admission, ticket: Ticket, early: bytes, reason: str) -> None:
    bench.hostile_inputs += 1
    # For half of the time that the others hold their pages: a worker that never answers must not grant at last.
    with bench.peer.push(ticket, bench.limits.timeout_s / 2) as push:
        push.send(_opening(bench, admission, ticket))
        if early:
            push.send(early)
        else:
            push.finish()
        try:
            answer = push.receive()
        except CallFailed as failed:
            bench.check_failure(failed.failure, (reason,))
            return
    if answer is not None and answer.HasField("grant"):
        skip("the worker grants pages beyond those it has")
    fail(f"{answer} came, where {reason} was due")


@contextmanager
def _waiting(bench: Bench) -> Iterator[tuple[Request, Admission]]:
    """An admitted request for which too few pages are left, since others were granted theirs."""
    holders, held, wanted = _shares(bench)
    with ExitStack() as opened:
        for _ in range(holders):
            _, admission = _admitted(bench, opened, held)
            push = opened.enter_context(bench.peer.push(admission.ticket))
            push.send(_opening(bench, admission, admission.ticket))
            answer = push.receive()
            if answer is None or not answer.HasField("grant"):
                fail(f"{answer} came where a grant was due")
        yield _admitted(bench, opened, wanted)


def _shares(bench: Bench) -> tuple[int, int, int]:
    """How many hold, tokens of each, and tokens of the one that waits: more than are left beside them."""
    pages, size = bench.peer.accounts().pages_total, bench.contract.page_size
    context = bench.contract.context_limit or pages * size
    most = min(pages, context // size)  # pages of one request
    if most < 2:
        skip("a context of fewer than two pages")
    holders = -(-(pages - most + 1) // most)
    if holders > MOST_HOLDERS:
        skip(f"the pool of {pages} pages holds more than {MOST_HOLDERS} requests of full length")
    held = -(-(pages - most + 1) // holders)
    return holders, max(1, held * size - OUTPUT), most * size - OUTPUT


def _admitted(bench: Bench, opened: ExitStack, tokens: int) -> tuple[Request, Admission]:
    opening = opening_for(bench.contract, bench.ids(tokens), tenant=bench.tenant(), max_tokens=OUTPUT)
    request = opened.enter_context(bench.peer.request(opening))
    return request, admission_from_proto(request.take("admitted"))


def _opening(bench: Bench, admission: Admission, ticket: Ticket) -> bytes:
    opening = make_opening(ticket, admission.identity, bench.contract, logits_only=admission.logits_only)
    return pb.PushRequest(open=opening).SerializeToString()


_CASES: dict[str, Callable[[Bench], None]] = {
    "a frame before the grant": _frame,
    "an end before the grant": _end,
}
