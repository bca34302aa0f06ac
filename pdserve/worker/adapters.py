"""The adapters of one worker: which version each name stands for, and who still uses which.

    load(name)  -> NAMED ---- load of other content for its last name --> REPLACED --(unused for linger_s)--> gone
                   |  ^                                                     |
                   |  +----------------- load of the same content ----------+
      unload(name) |
                   v
                CLOSING --(nobody uses it)--> gone; when the time is over: NAMED again

A version is its content's digest. Requests name a digest, never a name, so none can change its version on the way.
A NAMED version takes them, and so does a REPLACED one: a request that was admitted elsewhere just before the
replacement, or goes on after a worker's death, ends on the version it began on. A CLOSING one takes no new ones.

Who uses a version is counted among the requests that are here, never booked, so nothing can be booked wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pdserve.errors import Exhausted, InvalidRequest, NotFound, PermissionDenied, Refused, shown
from pdserve.registry.records import NamedAdapter

MAX_NAME = 128  # characters


class Readable(Protocol):
    """An adapter in memory."""

    @property
    def digest(self) -> bytes: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class Store(Protocol):
    """What an engine computes with. Removed is only what no request here uses."""

    def add(self, adapter: Any) -> None: ...
    def remove(self, digest: bytes) -> None: ...


@dataclass(frozen=True)
class AdapterStatus:
    name: str  # empty: a replaced version
    digest: bytes
    users: int
    rank: int
    size: int  # bytes


@dataclass
class _Version:
    adapter: Readable
    unused_since: float = 0.0  # monotonic seconds; counts only for a replaced one
    closing: bool = False


class AdapterShelf:
    """Belongs to the worker's event loop.

    Args:
        store: gets and gives up what is loaded.
        read: reads a directory into memory, in another thread; raises CheckpointError.
        in_use: the digest of every request that is here; None: the base model.
        announce: tells routers that `named` has changed.
        root: directory under which adapters may be loaded while the worker serves; empty: none may.
        limit: versions that may be loaded.
        linger_s: how long a replaced version stays after its last use.
    """

    def __init__(
        self,
        store: Store,
        read: Callable[[Path], Readable],
        in_use: Callable[[], Iterable[bytes | None]],
        announce: Callable[[], Awaitable[None]],
        root: str = "",
        limit: int = 16,
        linger_s: float = 30.0,
    ) -> None:
        self._store = store
        self._read = read
        self._in_use = in_use
        self._announce = announce
        self._root = root
        self._limit = limit
        self._linger_s = linger_s
        self._names: dict[str, bytes] = {}
        self._versions: dict[bytes, _Version] = {}
        self._loading = asyncio.Lock()
        self._looking = asyncio.Event()  # the reaper has come by

    def __contains__(self, digest: object) -> bool:
        """Whether a new request may use it."""
        version = self._versions.get(digest) if isinstance(digest, bytes) else None
        return version is not None and not version.closing

    @property
    def count(self) -> int:
        """Versions in memory."""
        return len(self._versions)

    def named(self) -> tuple[NamedAdapter, ...]:
        """What new requests may use, by name; then replaced versions, with an empty name."""
        return tuple(NamedAdapter(status.name, status.digest) for status in self.status() if status.digest in self)

    def status(self) -> tuple[AdapterStatus, ...]:
        """Everything that is loaded, by name; then what has none."""
        rest = [("", digest) for digest in sorted(set(self._versions) - set(self._names.values()))]
        return tuple(self._status(name, digest) for name, digest in (*sorted(self._names.items()), *rest))

    def locate(self, path: str) -> Path:
        """Where a caller's path leads. Raises PermissionDenied outside of the directory that is meant for adapters."""
        if not self._root:
            raise PermissionDenied(
                "this worker loads no adapters while it serves",
                reason="ADAPTERS_OFF",
                field="adapter_root",
                remedy="start it with adapter_root, or name the adapter in its configuration",
            )
        root = Path(self._root).resolve()
        found = (root / path).resolve()
        if not found.is_relative_to(root):
            raise PermissionDenied(
                f"{shown(path)} is not under this worker's adapter_root",
                reason="ADAPTER_PATH",
                field="path",
                remedy="put the adapter's directory there",
            )
        return found

    async def load(self, name: str, path: Path) -> None:
        """Serves the adapter at `path` under a name. Idempotent for the same content.

        Raises:
            InvalidRequest: INVALID_ADAPTER_NAME.
            CheckpointError: what is wrong with the files.
            Exhausted: ADAPTERS_FULL. Refused: ADAPTER_CLOSING.
        """
        check_adapter_name(name)
        async with self._loading:
            self._place(name, await asyncio.to_thread(self._read, path))
            await self._announce()

    async def unload(self, name: str, wait_s: float) -> None:
        """Serves a name no longer, once nobody uses its version.

        Raises NotFound (UNKNOWN_ADAPTER); Refused (ADAPTER_IN_USE) when somebody still does after `wait_s` seconds,
        and then serves it as before.
        """
        digest = self._names.pop(name, None)
        if digest is None:
            raise NotFound(
                f"there is no adapter {shown(name)}", reason="UNKNOWN_ADAPTER", field="name", remedy="see the list"
            )
        if digest in self._names.values():
            await self._announce()
            return
        self._versions[digest].closing = True
        try:
            await self._announce()
            async with asyncio.timeout(wait_s):
                while self._users(digest):
                    self._looking.clear()
                    await self._looking.wait()
            self._drop(digest)
        except TimeoutError:
            self._restore(name, digest)
            await self._announce()
            raise Refused(
                f"adapter {shown(name)} is still used; requests: {self._users(digest)}",
                reason="ADAPTER_IN_USE",
                field="name",
                remedy="wait longer, or end them",
                retryable=True,
            ) from None
        finally:
            if digest in self._versions:
                self._restore(name, digest)

    def reap(self, now: float) -> None:
        """Gives up replaced versions that nobody has used for long; whoever waits for its users looks again.

        Call it on a timer, with monotonic seconds.
        """
        self._looking.set()
        for digest, version in list(self._versions.items()):
            if version.closing or digest in self._names.values():
                continue
            if self._users(digest):
                version.unused_since = now
            elif now >= version.unused_since + self._linger_s:
                self._drop(digest)

    def _place(self, name: str, adapter: Readable) -> None:
        digest, before = adapter.digest, self._names.get(name)
        known = self._versions.get(digest)
        if known is not None and known.closing:
            raise Refused(
                "this very version is being unloaded",
                reason="ADAPTER_CLOSING",
                field="name",
                remedy="load it again when that is done",
                retryable=True,
            )
        if known is None:
            if len(self._versions) >= self._limit:
                raise Exhausted(
                    f"{len(self._versions)} adapters are loaded, replaced ones that are still used among them",
                    reason="ADAPTERS_FULL",
                    field="max_adapters",
                    remedy="unload one, or raise max_adapters",
                    retryable=False,
                )
            self._store.add(adapter)
            self._versions[digest] = _Version(adapter)
        self._names[name] = digest
        if before is not None:
            self._retire(before)

    def _users(self, digest: bytes) -> int:
        return sum(each == digest for each in self._in_use())

    def _retire(self, digest: bytes) -> None:
        """Its linger time begins, if no name stands for it any more."""
        if digest not in self._names.values():
            self._versions[digest].unused_since = time.monotonic()

    def _restore(self, name: str, digest: bytes) -> None:
        """It is not unloaded after all, but its name may have been given to another one meanwhile."""
        self._versions[digest].closing = False
        self._names.setdefault(name, digest)
        self._retire(digest)

    def _drop(self, digest: bytes) -> None:
        del self._versions[digest]
        self._store.remove(digest)

    def _status(self, name: str, digest: bytes) -> AdapterStatus:
        adapter = self._versions[digest].adapter
        return AdapterStatus(name, digest, self._users(digest), adapter.rank, adapter.size)


def check_adapter_name(name: str) -> None:
    """Raises InvalidRequest for one that could not stand in `model`, or not be read in a log."""
    good = 0 < len(name) <= MAX_NAME and name.isprintable() and not any(c.isspace() or c == ":" for c in name)
    if not good:
        raise InvalidRequest(
            f"{shown(name)} is no name for an adapter",
            reason="INVALID_ADAPTER_NAME",
            field="name",
            remedy=f"use 1 to {MAX_NAME} printable characters without blanks and colons",
        )
