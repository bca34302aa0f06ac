"""How a worker that Ray runs is told to drain: by a socket file that only its own user can open.

    replica:  DrainDoor(drain).open() -> ... -> close()
    pod:      `pdserve drain`, before Ray is told to stop: knocks at every door here, returns when all have drained

A worker of its own process needs none of this, SIGTERM drains it. Ray's processes die of one
without a word to the replicas in them. The file of a replica that was killed goes when the next
one here opens, or when somebody knocks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

log = logging.getLogger(__name__)

_SUFFIX = ".drain"
_KNOCK_S = 5.0  # for one line from the same machine
KNOCK = b"drain\n"
DRAINED = b"drained\n"


def folder() -> Path:
    """Where the doors of this user are; nobody else may look in."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"pdserve-{os.getuid()}"


class DrainDoor:
    """One worker's socket. `drain` is awaited for every knock, so it must be idempotent. A connection alone is none."""

    def __init__(self, drain: Callable[[], Awaitable[None]]) -> None:
        self._drain = drain
        self._server: asyncio.Server | None = None
        self.path = folder() / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"

    async def open(self) -> None:
        """Raises OSError when the socket cannot be made."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned()
        being_made = self.path.with_suffix("")
        self._server = await asyncio.start_unix_server(self._answer, being_made)
        being_made.rename(self.path)  # so that every door with this suffix listens, or is nobody's

    async def close(self) -> None:
        """Idempotent. Who is still waiting sees the end of the connection."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self.path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await _knocks(reader):
                log.info("told to drain")
                await self._drain()
                writer.write(DRAINED)
                await writer.drain()
        except ConnectionError:
            log.info("who told us to drain has gone")
        finally:
            writer.close()


async def _knocks(reader: asyncio.StreamReader) -> bool:
    """False: somebody looked whether anybody is here."""
    try:
        async with asyncio.timeout(_KNOCK_S):
            return await reader.readline() == KNOCK
    except (TimeoutError, ValueError):  # a line without an end
        return False


def _remove_abandoned() -> None:
    """The files of workers that were killed: nobody listens behind them any more. One without the suffix may be of a
    worker that will listen in a moment, so it goes only if its process is gone, too.
    """
    for path in folder().glob("*"):  # pdserve up keeps a file here, too
        if path.suffix != _SUFFIX and _lives(path.name.partition("-")[0]):
            continue
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            try:
                caller.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.debug("%s: %s", path, error)  # it has just gone, or has more callers than it can take


def _lives(pid: str) -> bool:
    """True, too, for what is no process id."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):  # the last: of a process that is not ours
        return True
    return True


async def drain_all(timeout_s: float) -> tuple[int, int]:
    """Knocks at every door. Returns how many workers have drained, and how many have not within the time."""
    _remove_abandoned()
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
                writer.write(KNOCK)
                return await reader.read()
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return b""
