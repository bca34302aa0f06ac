"""How a worker that Ray runs is told to drain: by a socket file that only its own user can open.

    replica:  DrainDoor(drain).open() -> ... -> close()
    pod:      `pdserve drain`, before Ray is told to stop: knocks at every door here, returns when all have drained

A worker of its own process needs none of this, SIGTERM drains it. Ray's processes die of one
without a word to the replicas in them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

log = logging.getLogger(__name__)

_SUFFIX = ".drain"
DRAINED = b"drained\n"


def folder() -> Path:
    """Where the doors of this user are; nobody else may look in."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"pdserve-{os.getuid()}"


class DrainDoor:
    """One worker's socket. `drain` is awaited for every knock, so it must be idempotent."""

    def __init__(self, drain: Callable[[], Awaitable[None]]) -> None:
        self._drain = drain
        self._server: asyncio.Server | None = None
        self.path = folder() / f"{secrets.token_hex(4)}{_SUFFIX}"

    async def open(self) -> None:
        """Raises OSError when the socket cannot be made."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, self.path)

    async def close(self) -> None:
        """Idempotent. Who is still waiting sees the end of the connection."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self.path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        log.info("told to drain")
        try:
            await self._drain()
            writer.write(DRAINED)
            await writer.drain()
        except ConnectionError:
            log.info("who told us to drain has gone")
        finally:
            writer.close()


async def drain_all(timeout_s: float) -> tuple[int, int]:
    """Knocks at every door. Returns how many workers have drained, and how many have not within the time."""
    paths = sorted(folder().glob(f"*{_SUFFIX}"))
    answers = [answer for answer in await asyncio.gather(*(_knock(path, timeout_s) for path in paths)) if answer != ""]
    return answers.count(DRAINED), len(answers) - answers.count(DRAINED)


async def _knock(path: Path, timeout_s: float) -> bytes | str:
    """What the worker answers; "" when there is none behind the file any more."""
    try:
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_unix_connection(path)
            except (ConnectionRefusedError, FileNotFoundError):
                return ""
            try:
                return await reader.read()
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return b""
