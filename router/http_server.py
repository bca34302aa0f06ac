"""uvicorn inside our own event loop: our socket, our signals, our limits (http_protocol), our end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pdserve.errors import ConfigError, Internal
from pdserve.rpc.settings import RpcSettings, check_plaintext, join_address
from router.http_accept import TlsAccept
from router.http_crowd import Crowd
from router.http_protocol import MAX_HEADER_BYTES, BoundedProtocol, HttpLimits, bounded


class HttpServer:
    """One listener. States: built -> start() -> serving -> stop() -> stopped."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        rpc: RpcSettings,
        limits: HttpLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Port 0: any free one. Raises ConfigError when `host` is not loopback and plaintext is not allowed."""
        check_plaintext(host, rpc)
        self._host = host
        self._port = port
        self._crowd = Crowd(limits.connections)
        self._http = bounded(limits, self._crowd)
        self._accept = TlsAccept(tls, limits) if tls else None
        config = uvicorn.Config(
            app,
            http=self._http,  # type: ignore[arg-type]  # a function that makes a protocol does what its class does
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # seconds, whole or not
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
        )
        self._config = config
        self._server = _Embedded(config)
        self._task: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> str:
        """Binds and serves; returns "host:port" with the real port. Raises ConfigError if it cannot bind."""
        listener = self._bind()
        self.address = join_address(self._host, listener.getsockname()[1])
        plain = [] if self._accept else [listener]  # listeners that uvicorn accepts from by itself
        self._task = asyncio.create_task(self._server.serve(sockets=plain), name="http-server")
        started = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            listener.close()
            await self._task
            raise Internal("the HTTP server ended as it started")
        if self._accept is not None:
            self._accept.start(listener, self._connection)
        return self.address

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no new connections, lets requests finish for `grace_s` seconds, cuts off the rest. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        if self._accept is not None:
            self._accept.stop()
        self._server.should_exit = True
        await asyncio.wait({task}, timeout=grace_s)
        self._server.force_exit = True
        self._crowd.drop_all()  # requests that are left end by themselves once they see their clients gone
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)
        await task
        if self._accept is not None:
            await self._accept.ended()

    def _connection(self) -> BoundedProtocol:
        """As uvicorn makes one."""
        return self._http(config=self._config, server_state=self._server.server_state, app_state={})

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family, backlog=512)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {join_address(self._host, self._port)}: {error.strerror}",
                reason="CANNOT_BIND",
                field="http_port",
                remedy="stop the other process, or choose another port (0 takes any free one)",
            ) from error


class _Embedded(uvicorn.Server):
    """uvicorn without signal handlers of its own, and with an event for "accepting now"."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()
