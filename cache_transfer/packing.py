"""What one handoff sends in frames: from where the worker holds it, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from cache_transfer.codec import encode_header, payload_size
from cache_transfer.contract import WorkerContract
from cache_transfer.digests import Manifest
from cache_transfer.messages import FrameHeader, Unpacked
from cache_transfer.outbox import Outbox
from cache_transfer.pages import DirectSource, KVSource
from cache_transfer.waiting import settle
from pdserve.errors import Internal

T = TypeVar("T")


@dataclass
class Cargo:
    """Of one sender, for whichever way its frames travel.

    Args:
        changed: set when more was announced, a job has ended, or the receiver is done with some.
        executor: threads that read and hash; None: the loop's own.
    """

    outbox: Outbox
    manifest: Manifest
    contract: WorkerContract
    source: KVSource
    secret: bytes
    executor: Executor | None
    max_payload_bytes: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: float = 0.0  # of packing and sending, without the waits for what was not computed
    stopped: bool = False  # nothing of it is sent any more, so nothing need be read
    _jobs: set[asyncio.Future[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._copy = self.source.read_into if isinstance(self.source, DirectSource) else self._copy_pieces

    def unpacked(self, header: FrameHeader) -> Unpacked:
        return Unpacked(encode_header(header), payload_size(self.contract, header), partial(self._read, header))

    def start(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Runs it in a worker thread; `stop` waits for it."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return future

    async def next_change(self) -> None:
        await self.changed.wait()
        self.changed.clear()

    async def stop(self) -> None:
        """No job runs after this. Survives cancellation."""
        self.stopped = True
        await settle(self._jobs)

    def _read(self, header: FrameHeader, out: memoryview) -> None:
        if not self.stopped:
            self._copy(header.plane, header.layer, header.heads, header.tokens, out)

    def _copy_pieces(
        self, plane: str, layer: int, heads: tuple[int, int], tokens: tuple[int, int], out: memoryview
    ) -> None:
        at = 0
        where = f"plane {plane} of layer {layer}, heads {heads}, tokens {tokens}"
        for piece in self.source.read(plane, layer, heads, tokens):
            end = at + piece.nbytes
            if end > len(out):
                raise Internal(f"the source gave more than {len(out)} bytes for {where}")
            out[at:end] = piece.cast("B") if piece.c_contiguous else piece.tobytes()
            at = end
        if at != len(out):
            raise Internal(f"the source gave {at} bytes instead of {len(out)} for {where}")
