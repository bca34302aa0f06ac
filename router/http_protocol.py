"""One HTTP connection, with every wait for its client bounded: uvicorn's h11 protocol and what it lacks.

    accepted --whole header within `header_s`--> request --> answer --> idle (`keep_alive_s`) --> closed
       |                                                       |          `--> the next header, as above
       `- too late, too large, no HTTP: an error, closed       `- the rest of a body within `header_s`, too

Before it, a TLS handshake has `header_s`, too (router.http_accept). router.http_crowd says who goes when more than
`connections` are open.
The time for a request's body, and for a stream that its client does not read, is the
application's to bound (router.openai_http).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from pdserve.errors import DeadlineExceeded, Exhausted, InvalidRequest, PdserveError
from router.http_crowd import Crowd
from router.openai_render import dumps, error_body

MAX_HEADER_BYTES = 64 * 1024  # request line and headers
CERTIFICATE_NAMES = "pdserve.certificate_names"  # in an ASGI scope: the DNS names of a client's verified certificate


@dataclass(frozen=True)
class HttpLimits:
    connections: int
    """Open at a time."""

    header_s: float
    """From the connection, or the first byte of a later request, to the end of its header; for TLS before it, too."""

    keep_alive_s: float = 5.0
    """Without a request after an answer."""


def bounded(limits: HttpLimits, crowd: Crowd) -> Callable[..., BoundedProtocol]:
    """What uvicorn calls for every connection; it passes keyword arguments that are its own business."""

    def protocol(**given: Any) -> BoundedProtocol:
        return BoundedProtocol(limits, crowd, **given)

    return protocol


class BoundedProtocol(H11Protocol):
    """See the module's docstring."""

    def __init__(self, limits: HttpLimits, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._crowd = crowd
        self._accepted: socket.socket | None = None  # while TLS is not agreed
        self._has_place: bool | None = None  # None: it has not come yet
        self._header_timer: asyncio.TimerHandle | None = None
        self.app = _checked(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._accepted = None
        if self._has_place is None:
            self.come()
        if not self._has_place:
            self.app = _full(self._limits.connections)  # whatever it asks
        elif names := _certificate_names(transport):
            self.app = _named(self.app, names)
        self._watch()

    def come(self, accepted: socket.socket | None = None) -> None:
        """Joins the crowd; before there is a transport, where TLS comes first, with the `accepted` socket."""
        self._accepted = accepted
        self._has_place = self._crowd.come(self)

    def left(self) -> None:
        """It has gone before there was a transport."""
        self._crowd.leave(self)

    def drop(self) -> None:
        if self._accepted is None:
            self.transport.abort()
        else:
            with suppress(OSError):
                self._accepted.shutdown(socket.SHUT_RDWR)  # which ends the handshake

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._crowd.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        self._enter_work()

    def on_response_complete(self) -> None:
        self._crowd.wait(self)
        super().on_response_complete()  # which may take up a request that has come meanwhile
        self._enter_work()

    def _enter_work(self) -> None:
        """If a whole request is here. One that is only to close holds no place, however long its client takes."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._crowd.work(self)

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, or a header beyond MAX_HEADER_BYTES."""
        self._refuse(400, _no_request())

    def timeout_keep_alive_handler(self) -> None:
        # Closing would wait for the client to read what is still to be sent.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _watch(self) -> None:
        """A timer runs while the header of a request, or the rest of one already answered, is to come."""
        if self.conn.our_state not in (h11.IDLE, h11.DONE):
            self._stop_watching()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self._limits.header_s, self._header_late)

    def _stop_watching(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_late(self) -> None:
        limit_s = self._limits.header_s
        late = DeadlineExceeded(
            f"no whole request header came within {limit_s:g} s", field="header", remedy="send the request at once"
        )
        self._refuse(408, late)

    def _refuse(self, status: int, error: PdserveError) -> None:
        """Answers if no answer has begun, and ends the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = dumps(error_body(error)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _no_request() -> InvalidRequest:
    problem = f"this is not an HTTP request with a header of at most {MAX_HEADER_BYTES} bytes"
    return InvalidRequest(problem, reason="INVALID_HTTP", remedy="send an HTTP/1.1 request")


def _checked(app: ASGIApp) -> ASGIApp:
    """Refuses a body of two lengths: a proxy before us could see other requests in it than h11 does (RFC 9112, 6.3).
    Also a header beyond MAX_HEADER_BYTES that came in one piece: h11 measures only what is incomplete.
    """
    two_lengths = InvalidRequest(
        "the body has both a Content-Length and a Transfer-Encoding",
        reason="INVALID_HTTP",
        field="content-length",
        remedy="send one of them",
    )
    ambiguous, too_large = _answer(400, two_lengths), _answer(400, _no_request())

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) + 4 for k, v in headers)
        if size > MAX_HEADER_BYTES:
            await too_large(scope, receive, send)
        elif {name for name, _ in headers} >= {b"content-length", b"transfer-encoding"}:
            await ambiguous(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _certificate_names(transport: asyncio.Transport) -> frozenset[str]:
    """Those of a certificate that TLS has verified; where none is asked for, none."""
    certificate = transport.get_extra_info("peercert") or {}
    return frozenset(name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")


def _named(app: ASGIApp, names: frozenset[str]) -> ASGIApp:
    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, CERTIFICATE_NAMES: names}, receive, send)

    return named


def _full(count: int) -> ASGIApp:
    error = Exhausted(
        f"{count} requests are in work",
        reason="TOO_MANY_CONNECTIONS",
        field="router.max_active",
        remedy="send the request again later, and keep fewer connections open",
        retry_after_ms=1000,
    )
    return _answer(503, error)


def _answer(status: int, error: PdserveError) -> ASGIApp:
    """An application that answers every request with this error and ends the connection."""
    body = dumps(error_body(error)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app
