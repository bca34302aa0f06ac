"""A network that can be slow: a TCP relay in front of one listener."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

_PIECE = 1024  # bytes forwarded at a time


class Relay:
    """start() -> forwarding at full speed <-> slow -> close(). Belongs to one event loop."""

    def __init__(self) -> None:
        self.port = 0
        self._target = 0
        self._rate = 0.0  # bytes per second in each direction; 0: no limit
        self._only: Collection[int] | None = None
        self._fast = asyncio.Event()
        self._fast.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def aim(self, port: int) -> None:
        """Where new connections go."""
        self._target = port

    def slow(self, rate: float, only: Collection[int] | None = None) -> None:
        """From now on, also for what is under way.

        Args:
            rate: bytes per second of each connection, in each direction.
            only: connections that come from these ports; None: all.
        """
        self._rate, self._only = rate, only
        self._fast.clear()

    def hurry(self) -> None:
        """Full speed again."""
        self._fast.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; when either side ends it, so does the other."""
        source = writer.get_extra_info("peername")[1]
        other: asyncio.StreamWriter | None = None
        try:
            back, other = await asyncio.open_connection("127.0.0.1", self._target)
            ways = [
                asyncio.create_task(self._forward(reader, other, source)),
                asyncio.create_task(self._forward(back, writer, source)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            return  # nobody listens there now, which the client learns by the end of its connection
        finally:
            writer.transport.abort()
            if other is not None:
                other.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: int) -> None:
        while data := await reader.read(_PIECE):
            await self._pace(len(data), source)
            writer.write(data)
            await writer.drain()

    async def _pace(self, size: int, source: int) -> None:
        """Takes the time that a slow network would."""
        if self._fast.is_set() or (self._only is not None and source not in self._only):
            return
        hurried = asyncio.ensure_future(self._fast.wait())
        await asyncio.wait((hurried,), timeout=size / self._rate)
        hurried.cancel()
