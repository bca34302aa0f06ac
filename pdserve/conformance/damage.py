"""Damage on the way, and peers that go away or stop: cleaned up in time, and nothing of it is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import grpc

from pdserve.conformance.bench import Bench, expect, fail, skip
from pdserve.conformance.cases import Case
from pdserve.conformance.hostile import flip
from pdserve.conformance.peer import CallFailed
from pdserve.conformance.reasons import PUSH_REASONS

_S = grpc.StatusCode
REQUESTS, FLIPS = 6, 4  # requests, and attempts of each, per kind of message
ANY_DAMAGE = tuple(  # what a bit that was flipped anywhere after the opening may be refused with
    reason for reason, (status, _) in PUSH_REASONS.items() if status in (_S.INVALID_ARGUMENT, _S.DATA_LOSS)
)


def cases() -> Iterator[Case]:
    for name, run in _ENDINGS.items():
        yield Case(name, "damage", run, hostile=True)


def _damaged(bench: Bench, damage: Callable[[list[bytes], random.Random], None], reasons: Sequence[str]) -> None:
    """Damage after damage, each on an attempt of its own; the last attempt of each request is right."""
    draw = random.Random(1)
    for _ in range(REQUESTS):
        first = bench.token()
        with bench.handoff() as handoff:
            ticket = handoff.admission.ticket
            for _ in range(FLIPS):
                messages = handoff.draft(bench.other_token(first), ticket).messages()
                damage(messages, draw)
                bench.refused(ticket, messages, reasons)
                ticket = handoff.retry()
            handoff.complete(first, ticket)


def _bits(bench: Bench, pick: Callable[[list[bytes]], int]) -> None:
    """One bit, anywhere in one message."""

    def damage(messages: list[bytes], draw: random.Random) -> None:
        place = pick(messages)
        messages[place] = flip(messages[place], draw.randrange(8 * len(messages[place])))

    _damaged(bench, damage, ANY_DAMAGE)


def _swaps(bench: Bench) -> None:
    """Any two messages after the opening change places."""

    def damage(messages: list[bytes], draw: random.Random) -> None:
        a, b = draw.sample(range(1, len(messages)), 2)
        messages[a], messages[b] = messages[b], messages[a]

    _damaged(bench, damage, ("FRAME_SEQUENCE", "MESSAGE_ORDER"))


def _cancelled(bench: Bench, stage: str) -> None:
    """The caller goes away; pages come back, and the prefill side is told."""
    bench.hostile_inputs += 1
    with bench.handoff(max_tokens=_room(bench)) as handoff:
        draft = handoff.draft(bench.token())
        messages = draft.messages()
        if stage == "before the push":
            handoff.request.close()
            bench.settle()
            return
        with bench.peer.push(draft.ticket) as push:
            bench.granted(push, messages[0], draft)
            if stage == "while tokens come":
                push.send(*messages[1:])
                push.finish()
                bench.acknowledged(push, draft)
                handoff.request.take("tokens")
                handoff.request.close()
                bench.settle()
                return
            if stage == "between two frames":
                push.send(messages[1])
            handoff.request.close()
            bench.settle()
            push.send(*messages[1:])
            push.finish()
            try:
                answer = push.receive()
                fail(f"the cache of a cancelled request was taken: {answer}")
            except CallFailed as failed:
                expect(failed.reason == "ATTEMPT_STALE", f"the sender was told {failed.failure}, not ATTEMPT_STALE")


def _room(bench: Bench) -> int:
    """Output long enough to be still running when the caller goes away."""
    limit = bench.contract.context_limit or 256
    return max(2, min(limit - 40, 200))


def _sender_cancelled(bench: Bench) -> None:
    """The sender cancels its stream between two frames; another attempt brings the cache."""
    first = bench.token()
    bench.hostile_inputs += 1
    with bench.handoff() as handoff:
        draft = handoff.draft(bench.other_token(first))
        messages = draft.messages()
        with bench.peer.push(draft.ticket) as push:
            bench.granted(push, messages[0], draft)
            push.send(*messages[1:2])
        handoff.complete(first, handoff.retry())


def _too_large(bench: Bench) -> None:
    """gRPC itself refuses it, so there is no detail; the attempt is over all the same."""
    first = bench.token()
    with bench.handoff() as handoff:
        for again in (False, True):
            ticket = handoff.retry() if again else handoff.admission.ticket
            draft = handoff.draft(bench.other_token(first), ticket)
            draft.frames[0].payload = bytes(6 << 20)
            messages = draft.messages()
            bench.hostile_inputs += 1
            with bench.peer.push(ticket) as push:
                bench.granted(push, messages[0], handoff.draft(first, ticket))
                push.send(*messages[1:])
                try:
                    fail(f"it was answered with {push.receive()}")
                except CallFailed as failed:
                    right = failed.failure.status is _S.RESOURCE_EXHAUSTED
                    expect(right, f"it ended with {failed.failure}, not RESOURCE_EXHAUSTED")
        handoff.complete(first, handoff.retry())


def _stalled(bench: Bench) -> None:
    """A sender that stops between two frames."""
    if not bench.limits.wait_s:
        skip("it would take the worker's idle limit; allow it with --wait")
    first = bench.token()
    with bench.handoff() as handoff:
        draft = handoff.draft(bench.other_token(first))
        bench.hostile_inputs += 1
        with bench.peer.push(draft.ticket, bench.limits.wait_s) as push:
            messages = draft.messages()
            bench.granted(push, messages[0], draft)
            push.send(messages[1])
            try:
                push.receive()
                fail("a stalled stream ended with OK")
            except CallFailed as failed:
                if not failed.detailed:
                    skip(f"the worker waits longer than {bench.limits.wait_s:g} s")
                expect(failed.failure.status is _S.DEADLINE_EXCEEDED, f"it ended with {failed.failure}")
        handoff.complete(first, handoff.retry())


_ENDINGS: dict[str, Callable[[Bench], None]] = {
    "bits of the first frame flipped": lambda bench: _bits(bench, lambda messages: 1),
    "bits of the last frame flipped": lambda bench: _bits(bench, lambda messages: len(messages) - 3),
    "bits of the logits flipped": lambda bench: _bits(bench, lambda messages: len(messages) - 2),
    "bits of the commit flipped": lambda bench: _bits(bench, lambda messages: len(messages) - 1),
    "two messages swapped": _swaps,
    "the caller goes before the push": lambda bench: _cancelled(bench, "before the push"),
    "the caller goes after the grant": lambda bench: _cancelled(bench, "after the grant"),
    "the caller goes between two frames": lambda bench: _cancelled(bench, "between two frames"),
    "the caller goes while tokens come": lambda bench: _cancelled(bench, "while tokens come"),
    "the sender goes between two frames": _sender_cancelled,
    "a message above the limit": _too_large,
    "the sender stalls between two frames": _stalled,
}
