"""The metrics of one part as a page, and a small HTTP listener for parts that have none of their own.

A page has a registry of its own, never the library's global one: several parts may live in one process.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import cast

import h11
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pdserve.errors import ConfigError, PdserveError

log = logging.getLogger(__name__)

PATH = "/metrics"
MAX_CONNECTIONS = 16
MAX_HEADER_BYTES = 16 * 1024
EXCHANGE_S = 10.0  # from the connection to the last byte of the answer

Check = Callable[[frozenset[str]], None]
Answer = tuple[int, bytes, str]  # status, body, content type


class MetricsPage:
    """Belongs to the event loop of the part that `collector` reads."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text, and its content type: OpenMetrics or Prometheus' own format, whichever `accept` asks for."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the library's, for a version that is no version
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type


class MetricsListener:
    """GET /metrics and nothing else: one answer per connection, few connections, each of them for a short time.

    built --start()--> serving --stop()--> stopped
    """

    def __init__(
        self,
        page: MetricsPage,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        check: Check = lambda names: None,
    ) -> None:
        """Port 0: any free one.

        Args:
            check: given the DNS names of the caller's verified certificate; raises PdserveError for one who may not
                see the page.
        """
        self._page = page
        self._host = host
        self._port = port
        self._tls = tls
        self._check = check
        self._server: asyncio.Server | None = None
        self._exchanges: set[_Exchange] = set()

    async def start(self) -> int:
        """Returns the port. Raises ConfigError (CANNOT_BIND)."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._exchange,
                self._host,
                self._port,
                ssl=self._tls,
                # A connection is ours to bound only from the end of its handshake on.
                ssl_handshake_timeout=EXCHANGE_S if self._tls else None,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {self._port} of {self._host}: {error.strerror}",
                reason="CANNOT_BIND",
                field="metrics_port",
                remedy="stop the other process, or choose another port (0 takes any free one)",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Cuts off answers that are on their way. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for exchange in tuple(self._exchanges):
            exchange.abort()
        await server.wait_closed()

    def _exchange(self) -> _Exchange:
        return _Exchange(self._page, self._check, self._exchanges)


class _Exchange(asyncio.Protocol):
    """One connection: a request header, an answer, the end."""

    def __init__(self, page: MetricsPage, check: Check, others: set[_Exchange]) -> None:
        self._page = page
        self._check = check
        self._others = others
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Under Ray it is uvloop's, which is one without being derived from it.
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(EXCHANGE_S, self.abort)
        self._others.add(self)
        if len(self._others) > MAX_CONNECTIONS:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._others.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._http.our_state is not h11.IDLE:
            return  # it has its answer
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError:
            self._write((400, b"this is not an HTTP request\n", "text/plain"))
        else:
            if isinstance(event, h11.Request):
                self._write(self._answer(event), body=event.method != b"HEAD")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, request: h11.Request) -> Answer:
        if request.method not in (b"GET", b"HEAD"):
            return 405, b"use GET\n", "text/plain"
        if request.target.partition(b"?")[0].decode("ascii") != PATH:
            return 404, f"only {PATH} is here\n".encode(), "text/plain"
        try:
            self._check(self._names())
        except PdserveError as error:
            return 403, f"{error}\n".encode(), "text/plain"
        accepts = [value.decode("latin-1") for name, value in request.headers if name == b"accept"]
        try:
            return 200, *self._page.render(",".join(accepts))
        except Exception:
            log.exception("the metrics page could not be made")
            return 500, b"the page could not be made, see the log\n", "text/plain"

    def _names(self) -> frozenset[str]:
        certificate = (self._transport.get_extra_info("peercert") if self._transport else None) or {}
        return frozenset(name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")

    def _write(self, answer: Answer, body: bool = True) -> None:
        assert self._transport is not None
        status, text, content_type = answer
        headers = [("content-type", content_type), ("content-length", str(len(text))), ("connection", "close")]
        events: list[h11.Event] = [h11.Response(status_code=status, headers=headers), h11.EndOfMessage()]
        if body:
            events.insert(1, h11.Data(data=text))
        for event in events:
            self._transport.write(self._http.send(event) or b"")
        self._transport.close()
