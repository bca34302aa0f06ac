"""Logits, commits and orders of messages that must be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pdserve.conformance.hostile import (
    COMMIT,
    FOREIGN,
    LOGITS,
    ORDER,
    Hostile,
    Make,
    changed,
    flip_first,
    flip_middle,
    garbage,
)
from pdserve.conformance.streams import Draft, wire


def endings() -> Iterator[Hostile]:
    yield from _logits()
    yield from _commits()
    yield from _orders()


def _logits() -> Iterator[Hostile]:
    def refuse(name: str, reason: str, make: Make) -> Hostile:
        return Hostile(name, LOGITS, (reason,), make)

    yield refuse("scores with a flipped bit", "LOGITS_DIGEST", _sent_logits(data=flip_middle))
    yield refuse("logits digest with a flipped bit", "LOGITS_DIGEST", _sent_logits(digest=flip_first))
    yield refuse("position changed after the digest", "LOGITS_DIGEST", _sent_logits(position=lambda at: at ^ 1))
    yield refuse("logits digest of 33 bytes", "MALFORMED_MESSAGE", _sent_logits(digest=lambda digest: digest + b"\0"))
    yield refuse("logits of the token before", "LOGITS_POSITION", _made_logits(position=lambda at: at - 1))
    yield refuse("logits of the token after", "LOGITS_POSITION", _made_logits(position=lambda at: at + 1))
    yield refuse("logits in bf16", "LOGITS_DTYPE", _made_logits(dtype=lambda _: "bf16"))
    yield refuse("logits of no dtype", "LOGITS_DTYPE", _made_logits(dtype=lambda _: ""))
    yield refuse("one score too few", "LOGITS_SIZE", _made_logits(data=lambda data: data[:-4]))
    yield refuse("one score too many", "LOGITS_SIZE", _made_logits(data=lambda data: data + bytes(4)))
    yield refuse("no score", "LOGITS_SIZE", _made_logits(data=lambda _: b""))
    yield refuse("logits of another handoff", "LOGITS_DIGEST", _foreign_logits)


def _sent_logits(**changes: Callable[[Any], Any]) -> Make:
    def make(draft: Draft) -> list[bytes]:
        requests = draft.seal()
        for name, change in changes.items():
            setattr(requests[-2].logits, name, change(getattr(requests[-2].logits, name)))
        return wire(requests)

    return make


def _made_logits(**changes: Callable[[Any], Any]) -> Make:
    def make(draft: Draft) -> list[bytes]:
        for name, change in changes.items():
            setattr(draft.logits, name, change(getattr(draft.logits, name)))
        return draft.messages()

    return make


def _foreign_logits(draft: Draft) -> list[bytes]:
    messages = draft.messages()
    draft.ticket = replace(draft.ticket, secret=FOREIGN)
    return [*messages[:-2], draft.messages()[-2], messages[-1]]


def _commits() -> Iterator[Hostile]:
    def refuse(name: str, reason: str, make: Make) -> Hostile:
        return Hostile(name, COMMIT, (reason,), make)

    def said(**changes: Callable[[int], int]) -> Make:
        def make(draft: Draft) -> list[bytes]:
            requests = draft.seal()
            for name, change in changes.items():
                setattr(requests[-1].commit, name, change(getattr(requests[-1].commit, name)))
            return wire(requests)

        return make

    yield refuse("manifest with one frame more", "MANIFEST", said(frames=lambda n: n + 1))
    yield refuse("manifest with one byte more", "MANIFEST", said(payload_bytes=lambda n: n + 1))
    yield refuse("manifest with 2^64 - 1 bytes", "MANIFEST", said(payload_bytes=lambda _: 2**64 - 1))
    yield refuse("manifest with another start", "MANIFEST", said(start=lambda n: n + 1))
    yield refuse("manifest with another end", "MANIFEST", said(end=lambda n: n + 1))
    yield refuse("manifest digest with a flipped bit", "MANIFEST", _changed_commit(flip_first))
    yield refuse("manifest digest of another handoff", "MANIFEST", _foreign_commit)
    yield refuse("manifest digest of 0 bytes", "MALFORMED_MESSAGE", _changed_commit(lambda _: b""))


def _changed_commit(change: Callable[[bytes], bytes]) -> Make:
    def make(draft: Draft) -> list[bytes]:
        requests = draft.seal()
        requests[-1].commit.digest = change(requests[-1].commit.digest)
        return wire(requests)

    return make


def _foreign_commit(draft: Draft) -> list[bytes]:
    messages = draft.messages()
    draft.ticket = replace(draft.ticket, secret=FOREIGN)
    return [*messages[:-1], draft.messages()[-1]]


def _orders() -> Iterator[Hostile]:
    def refuse(name: str, reason: str, pick: Callable[[list[bytes]], list[bytes]]) -> Hostile:
        return Hostile(name, ORDER, (reason,), lambda draft: pick(draft.messages()))

    order, gone = "MESSAGE_ORDER", "SENDER_GONE"
    yield refuse("a second opening", order, lambda m: [m[0], *m])
    yield refuse("the commit right after the opening", order, lambda m: [m[0], m[-1]])
    yield refuse("the commit before the logits", order, lambda m: [*m[:-2], m[-1]])
    yield refuse("logits before the frames", order, lambda m: [m[0], m[-2], *m[1:-2], m[-1]])
    yield refuse("logits twice", order, lambda m: [*m[:-1], m[-2], m[-1]])
    yield refuse("an opening before the commit", order, lambda m: [*m[:-1], m[0], m[-1]])
    yield refuse("an end right after the grant", gone, lambda m: m[:1])
    yield refuse("an end between two frames", gone, lambda m: m[:2])
    yield refuse("an end before the logits", gone, lambda m: m[:-2])
    yield refuse("an end before the commit", gone, lambda m: m[:-1])
    for name, data in garbage().items():
        yield Hostile(
            f"{name} in place of a frame",
            ORDER,
            ("MALFORMED_MESSAGE",),
            lambda d, data=data: changed(d, 1, lambda _: data),  # type: ignore[misc]
        )
