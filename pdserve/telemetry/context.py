"""Which request the running code works for: its ids, for logs, and its place in a trace. And how calls carry both.

A door or a service enters a `Scope` when a request comes to it; whatever it calls or starts from there on sees it
(contextvars). Between parts three pieces of gRPC metadata carry it: `x-request-id`, `traceparent`, `tracestate`. They
are read strictly and written anew, so that nothing else of a caller's metadata goes on. Baggage is not read.

`traceparent` and `tracestate` are W3C Trace Context; what is malformed counts as absent, as it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

REQUEST_ID, TRACEPARENT, TRACESTATE = "x-request-id", "traceparent", "tracestate"

MAX_STATE = 512  # characters that are passed on
_MAX_MEMBERS = 32
_KNOWN_FLAGS = 0x03  # sampled, random trace id

_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_MEMBER = re.compile(rf"({_KEY})=([ -+\--<>-~]{{0,255}}[!-+\--<>-~])")


@dataclass(frozen=True)
class TraceContext:
    """A span, as those name it that come after it."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    sampled: bool
    random: bool = False  # the trace id was made at random
    state: str = ""  # other tracing systems' own

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled | self.random << 1:02x}"


@dataclass(frozen=True)
class Scope:
    """What is known of the request so far; empty: not known."""

    part: str = ""  # router | prefill | decode
    worker: str = ""
    request_id: str = ""  # the router's
    handoff_id: str = ""  # hexadecimal
    attempt: int = 0
    trace: TraceContext | None = None  # the innermost span that is open
    label: str = ""  # the caller's own name for it; stays with the router


_NOTHING = Scope()
_scope: ContextVar[Scope] = ContextVar("scope", default=_NOTHING)


def current() -> Scope:
    return _scope.get()


def enter(scope: Scope) -> None:
    """For the rest of the running task, and for those that it starts from now on."""
    _scope.set(scope)


def update(**known: Any) -> None:
    """More about the same request."""
    enter(replace(current(), **known))


def is_request_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def received(metadata: Iterable[tuple[str, Any]] | None, part: str, worker: str) -> Scope:
    """What a call of another part of this deployment brings."""
    given = list(metadata or ())
    ids = values(given, REQUEST_ID)
    return Scope(
        part=part,
        worker=worker,
        request_id=ids[0] if len(ids) == 1 and is_request_id(ids[0]) else "",
        trace=parse(values(given, TRACEPARENT), values(given, TRACESTATE)),
    )


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata of a call to another part, made of the scope alone."""
    scope, found = current(), []
    if scope.request_id:
        found.append((REQUEST_ID, scope.request_id))
    if scope.trace is not None:
        found.append((TRACEPARENT, scope.trace.traceparent))
        if scope.trace.state:
            found.append((TRACESTATE, scope.trace.state))
    return tuple(found)


def values(metadata: Iterable[tuple[str, Any]], key: str) -> list[str]:
    """Every text value of a key."""
    return [value for name, value in metadata if name == key and isinstance(value, str)]


def parse(parents: list[str], states: list[str]) -> TraceContext | None:
    """The span that a caller names as its own, from all its `traceparent` and `tracestate` headers."""
    found = _PARENT.fullmatch(parents[0].strip(" \t")) if len(parents) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    bits = int(flags, 16) & _KNOWN_FLAGS
    return TraceContext(trace_id, span_id, bool(bits & 1), bool(bits & 2), _state(states))


def _state(headers: list[str]) -> str:
    """A list of members that is passed on; empty when one of them is malformed."""
    texts = [text.strip(" \t") for header in headers for text in header.split(",")]
    members = [text for text in texts if text]
    matches = [_MEMBER.fullmatch(member) for member in members[: _MAX_MEMBERS + 1]]
    keys = {match[1] for match in matches if match}
    if len(members) > _MAX_MEMBERS or len(keys) != len(members):
        return ""
    while len(state := ",".join(members)) > MAX_STATE:
        members.pop()
    return state
