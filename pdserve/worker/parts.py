"""The parts that a worker of either pool brings to `PoolWorker`, as far as that needs to know them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.worker.metrics import PoolCounted


class Steps(Protocol):
    """The engine's thread."""

    @property
    def steps(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    def close(self, limit_s: float | None = None) -> bool: ...


class Books(Protocol):
    """Who holds which page."""

    @property
    def pages(self) -> int: ...
    @property
    def free_count(self) -> int: ...
    @property
    def held_count(self) -> int: ...
    @property
    def cached_count(self) -> int: ...
    def holdings(self) -> Mapping[str, tuple[int, ...]]: ...
    def check_integrity(self) -> None: ...


class Requests(Protocol):
    """What a worker's pipeline does for the way to the end."""

    @property
    def quiet(self) -> asyncio.Event:
        """Set while no request is here."""
        ...

    @property
    def counted(self) -> PoolCounted:
        """For the metrics page."""
        ...

    @property
    def count(self) -> int:
        """Requests that are here."""
        ...

    @property
    def adapters_in_use(self) -> Iterable[bytes | None]:
        """The adapter of every request that is here; None: the base model."""
        ...

    def loop(self) -> Coroutine[None, None, None]:
        """Plans and runs steps until it is cancelled."""
        ...

    def reap(self, now: float) -> None:
        """Ends what is overdue at `now`, in monotonic seconds."""
        ...

    def end_all(self, error: PdserveError) -> None:
        """Tells every request to end with `error`."""
        ...
