"""Accepts connections that begin with TLS: a listener of asyncio's own knows of them only when both ends have agreed.

accepted, with a place in the crowd --handshake within `header_s`--> an HTTP connection like any other
                                        `- too slow, broken, no TLS, or dropped for a newcomer: closed
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from router.http_protocol import BoundedProtocol, HttpLimits

_RETRY_S = 0.1


class TlsAccept:
    """From `start` to `stop`, on one event loop. Closes the listener."""

    def __init__(self, tls: ssl.SSLContext, limits: HttpLimits) -> None:
        self._tls = tls
        self._limits = limits
        self._handshakes: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None

    def start(self, listener: socket.socket, http: Callable[[], BoundedProtocol]) -> None:
        """`http` makes the protocol of a connection."""
        listener.setblocking(False)
        self._listener, self._http = listener, http
        self._listen()

    def stop(self) -> None:
        """Takes no more; handshakes go on. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        self._listener = self._pause = None

    async def ended(self) -> None:
        """Waits for the handshakes, whose connections have been dropped."""
        await asyncio.gather(*self._handshakes)

    def _listen(self) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError:  # for want of descriptors
            loop.remove_reader(listener)
            self._pause = loop.call_later(_RETRY_S, self._listen)
            return
        connection.setblocking(False)
        protocol = self._http()
        protocol.come(connection)
        task = loop.create_task(self._agree(protocol, connection), name="tls-handshake")
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _agree(self, protocol: BoundedProtocol, connection: socket.socket) -> None:
        """A silent client gets no longer to say goodbye, either, when the connection is closed."""
        limit_s = self._limits.header_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except OSError:  # of TLS, of the network, or too late: there is nobody who could be told
            protocol.left()
