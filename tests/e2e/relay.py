"""A TCP relay between a prefill and a decode worker, which turns over single bits on the way there."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_CHUNK = 1 << 16


class Relay:
    """Listens on a loopback port of its own and passes everything on to `target`.

    `flip_at` counts the bytes towards the target from the moment it is set; the bit of that byte is
    turned over, and `every` says after how many more bytes the next one is (0: only once).
    """

    def __init__(self) -> None:
        self.target = ""
        self.passed = 0
        """Bytes towards the target since `arm`."""
        self.flips = 0
        self._flip_at: int | None = None
        self._every = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def arm(self, flip_at: int | None, every: int = 0) -> None:
        self.passed = self.flips = 0
        self._flip_at, self._every = flip_at, every

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.rsplit(":", 1)
        there, back = await asyncio.open_connection(host, int(port))
        pipes = [
            asyncio.create_task(self._pipe(reader, back, damages=True)),
            asyncio.create_task(self._pipe(there, writer, damages=False)),
        ]
        for task in pipes:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, damages: bool) -> None:
        try:
            with suppress(ConnectionError):
                while data := await reader.read(_CHUNK):
                    writer.write(self._damaged(data) if damages else data)
                    await writer.drain()
        finally:
            writer.close()

    def _damaged(self, data: bytes) -> bytes:
        out = bytearray(data)
        while self._flip_at is not None and self._flip_at < self.passed + len(out):
            at = self._flip_at - self.passed
            out[at] ^= 1 << (self._flip_at % 8)
            self.flips += 1
            self._flip_at = self._flip_at + self._every if self._every else None
        self.passed += len(out)
        return bytes(out)
