"""Handoffs that every decode worker must take."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from cache_transfer.contract import HandoffIdentity, WorkerContract, prompt_digest
from pdserve.conformance import variants
from pdserve.conformance.bench import BEST, Bench, Handoff, expect, skip
from pdserve.conformance.cases import Case
from pdserve.conformance.streams import Draft, together, wire

GROUP = "good"
_SMALL = {"tokens_per_frame": 2, "heads_per_frame": 1}


def cases() -> Iterator[Case]:
    def good(name: str, run: Callable[[Bench], None]) -> Case:
        return Case(name, GROUP, run)

    yield good("the worker describes itself", _described)
    yield good("ticket and identity are as documented", _ticket_and_identity)
    yield good("a whole cache", lambda bench: _one(bench))
    yield good("one token in each frame", lambda bench: _one(bench, tokens_per_frame=1))
    yield good("one head in each frame", lambda bench: _one(bench, heads_per_frame=1))
    yield good(
        "layers and heads in another order",
        lambda bench: _one(bench, _scrambled, tokens_per_frame=2, heads_per_frame=1),
    )
    yield good("several frames in each message", _together)
    yield good("headers in the widest encoding", lambda bench: _one(bench, widen))
    yield good("equal best scores: the lowest id", _tie)
    yield good("one token: logits only", _logits_only)
    yield good("prompts around a page's end", _page_boundaries)
    yield good("two equal requests, equal tokens", _deterministic)
    yield good("two handoffs at once", _interleaved)
    yield good("a prefix that is held stays where it is", _prefix_held)
    yield good("output so far is replayed, not sent again", _resumed)
    yield good("page size, axis order and device are converted", _converted)
    yield good("informational fields may differ", _informational)
    yield good("loss is reported, where both sides allow it", _lossy)
    yield good("what follows the commit is not read", _after_commit)


def _one(bench: Bench, change: Callable[[Draft], None] | None = None, **options: Any) -> None:
    first = bench.token()
    with bench.handoff() as handoff:
        draft = handoff.draft(first, **options)
        if change is not None:
            change(draft)
        bench.push(draft)
        answer = handoff.finish(first)
    expect(len(answer.ids) == 2, f"{len(answer.ids)} tokens came, 2 were asked for")
    finish = answer.finish
    expect(finish is not None and finish.reason == "length", f"the finish is {finish}, not for length")


def _together(bench: Bench) -> None:
    first = bench.token()
    with bench.handoff() as handoff:
        draft = handoff.draft(first, tokens_per_frame=1)
        requests = draft.seal()
        with bench.peer.push(draft.ticket) as push:
            most = bench.granted(push, wire(requests[:1])[0], draft).max_frames
            if most < 2:
                skip("the worker takes one frame in a message")
            push.send(*wire(together(requests, most))[1:])
            push.finish()
            bench.acknowledged(push, draft)
        handoff.finish(first)


def _described(bench: Bench) -> None:
    status = bench.peer.describe()
    expect(status.role == "decode", f"the worker's role is {status.role!r}, not decode")
    own, said = bench.contract.digest().hex(), bytes(status.contract_digest).hex()
    expect(own == said, f"the contract's digest is {own}, the worker says {said}")


def _ticket_and_identity(bench: Bench) -> None:
    tenant = bench.tenant()
    with bench.handoff(tenant=tenant) as handoff:
        ticket, identity = handoff.admission.ticket, handoff.admission.identity
        expect(ticket.attempt == 1, f"the first attempt is {ticket.attempt}")
        expect(identity.start == ticket.held_tokens == 0, f"tokens are held for a new tenant: {identity}, {ticket}")
        own = HandoffIdentity(
            bench.contract.digest(), None, tenant, prompt_digest(handoff.prompt), 0, len(handoff.prompt)
        )
        expect(identity == own, f"the identity is {identity}, not {own}")
        contract = handoff.admission.contract
        expect(contract == bench.contract, "the admitted contract is not the one that the worker describes")
        with bench.handoff() as other:
            theirs = other.admission.ticket
            expect(ticket.incarnation == theirs.incarnation, "two requests, two incarnations")
            expect(ticket.handoff_id != theirs.handoff_id, "two requests have one handoff id")
            expect(ticket.secret != theirs.secret, "two tickets have one secret")


def _scrambled(draft: Draft) -> None:
    """Layers last to first, of each head's tokens the first before the second."""

    def place(frame: Any) -> tuple[int, int, int]:
        header = frame.header
        return header["tokens"][0], -header["layer"], -header["heads"][0]

    draft.frames.sort(key=place)
    draft.renumber()


def widen(draft: Draft) -> None:
    """The same headers, keys in reverse, integers and lengths in the largest encoding that msgpack has."""
    for frame in draft.frames:
        if isinstance(frame.header, dict):
            pairs = list(frame.header.items())[::-1]
            frame.header = b"\x86" + b"".join(msgpack.packb(key) + _wide(value) for key, value in pairs)


def _wide(value: Any) -> bytes:
    if isinstance(value, int):
        return b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(_wide, value))
    text: bytes = value.encode()
    return b"\xdb" + struct.pack(">I", len(text)) + text


def _tie(bench: Bench) -> None:
    low, high = sorted((token := bench.token(), bench.other_token(token)))
    with bench.handoff() as handoff:
        bench.push(handoff.draft(low, best={low: BEST, high: BEST}))
        handoff.finish(low)


def _logits_only(bench: Bench) -> None:
    first = bench.token()
    with bench.handoff(max_tokens=1) as handoff:
        expect(handoff.admission.logits_only, "a request of one token asks for a cache")
        answer = handoff.complete(first)
    expect(answer.ids == [first], f"one token was asked for, {answer.ids} came")


def _page_boundaries(bench: Bench) -> None:
    size = bench.contract.page_size
    lengths = sorted({1, max(1, size - 1), size, size + 1, 2 * size, 2 * size + 1})
    limit = bench.contract.context_limit or 1 << 30
    for length in [n for n in lengths if n + 3 <= limit]:
        first = bench.token()
        with bench.handoff(bench.prompt(length), max_tokens=3) as handoff:
            handoff.complete(first)


def _deterministic(bench: Bench) -> None:
    prompt, first = bench.prompt(), bench.token()
    answers = []
    for _ in range(2):
        with bench.handoff(prompt, max_tokens=6) as handoff:
            answers.append(handoff.complete(first).ids)
    expect(answers[0] == answers[1], f"one cache, two answers: {answers}")


def _interleaved(bench: Bench) -> None:
    """Frames of two handoffs in turns; each gets its own first token."""
    one, two = bench.token(), bench.token()
    with bench.handoff(seed=1) as a, bench.handoff(seed=2) as b:
        first, second = a.draft(one), b.draft(two)
        with bench.peer.push(first.ticket) as left, bench.peer.push(second.ticket) as right:
            x, y = first.messages(), second.messages()
            bench.granted(left, x[0], first)
            bench.granted(right, y[0], second)
            for pair in zip(x[1:], y[1:], strict=True):
                left.send(pair[0])
                right.send(pair[1])
            left.finish()
            right.finish()
            bench.acknowledged(right, second)
            bench.acknowledged(left, first)
        a.finish(one)
        b.finish(two)


def _prefix_held(bench: Bench) -> None:
    """The second of two equal requests brings only what is missing, and is answered alike."""
    tenant, first = bench.tenant(), bench.token()
    prompt = bench.prompt(min(2 * bench.contract.page_size + 1, bench.contract.context_limit or 1 << 30))
    with bench.handoff(prompt, tenant=tenant, max_tokens=4) as handoff:
        cold = handoff.complete(first)
    with bench.handoff(prompt, tenant=tenant, max_tokens=4) as handoff:
        held = handoff.admission.ticket.held_tokens
        expect(held == handoff.admission.identity.start, "the ticket's held tokens are not the identity's start")
        expect(held < len(prompt), "the whole prompt is held: nothing gives the first logits")
        warm = handoff.complete(first)
    expect(cold.ids == warm.ids, f"{cold.ids} when all of it travelled, {warm.ids} with {held} tokens held")
    with bench.handoff(prompt, max_tokens=4) as handoff:
        other = handoff.admission.ticket.held_tokens
        expect(other == 0, f"another tenant finds {other} tokens of this prompt")
    if held == 0:
        skip("the worker holds no prefix")


def _resumed(bench: Bench) -> None:
    first, done = bench.token(), (bench.token(), bench.token())
    with bench.handoff(max_tokens=4, output_ids=done, forwarded_tokens=1) as handoff:
        expect(handoff.admission.identity.end == len(handoff.prompt), "the output so far is not part of the cache")
        bench.push(handoff.draft(first))
        answer = handoff.request.answer()
    expect(answer.first_index == 1, f"tokens begin at index {answer.first_index}, one was forwarded")
    expect(tuple(answer.ids[:2]) == (done[1], first), f"{answer.ids[:2]} came, due were {[done[1], first]}")
    expect(len(answer.ids) == 3, f"{len(answer.ids)} tokens came, 3 were due")


def _converted(bench: Bench) -> None:
    for code, other in variants.convertible(bench.contract):
        _with_contract(bench, other, (code,))


def _informational(bench: Bench) -> None:
    for _, other in variants.informational(bench.contract):
        _with_contract(bench, other, ())


def _lossy(bench: Bench) -> None:
    other = variants.castable(bench.contract)
    if other is None:
        skip("the worker allows no loss")
    _with_contract(bench, other, ("KV_DTYPE",))


def _with_contract(bench: Bench, other: WorkerContract, codes: tuple[str, ...]) -> None:
    first = bench.token()
    with bench.handoff(contract=other) as handoff:
        reported = tuple(d.code for d in handoff.admission.conversions)
        expect(reported == codes, f"conversions {list(codes)} are due, reported are {list(reported)}")
        handoff.complete(first)


def _after_commit(bench: Bench) -> None:
    """The answer is as if the rest had not been sent; the stream may end with or without it."""
    first = bench.token()
    with bench.handoff() as handoff:
        draft, rest = handoff.draft(first), _late(bench, handoff, first)
        messages = draft.messages()
        bench.hostile_inputs += 1
        with bench.peer.push(draft.ticket) as push:
            bench.granted(push, messages[0], draft)
            push.send(*messages[1:], *rest)
            push.finish()
            bench.acknowledged(push, draft)
        handoff.finish(first)


def _late(bench: Bench, handoff: Handoff, first: int) -> list[bytes]:
    """Frames and logits of another answer, right in every digest."""
    return handoff.draft(bench.other_token(first)).messages()[1:]
