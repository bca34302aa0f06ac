"""Copies between the cache on a device and host memory: through pinned buffers, on a stream of their own.

    pages -> host   the copies' stream waits for what the engine has queued, gathers into a buffer, and only the thread
                    that asked waits for it: the engine goes on with the next layer
    host -> pages   the payload goes into a buffer at once; copy and scatter are queued, and the engine's stream waits
                    for them before its next step

A ring of buffers bounds what is on its way. Which buffer a copy still uses is known from its event, never from time.
Producer of a buffer's content: a transfer thread or the device; consumer: the other one. Threads may share a Staging.

`HostLane` has the same rules without a device (work is done when it is queued), so that all of this runs on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.errors import Internal

BUFFERS = 4
BUFFER_BYTES = 4 << 20

Work = Callable[[], None]


class Done(Protocol):
    def wait(self) -> None:
        """Blocks the calling thread until the work has been done."""
        ...


class Lane(Protocol):
    """Work done in the order in which it is queued, beside the engine's own."""

    pinned: bool

    def queue(self, work: Work) -> Done: ...

    def mark(self) -> None:
        """The engine has queued writes: work queued here from now on comes after them."""
        ...

    def join(self) -> None:
        """What the engine queues from now on comes after all that has been queued here."""
        ...


class _AtOnce:
    def wait(self) -> None:
        pass


class HostLane:
    """Without a device: work is done when it is queued."""

    pinned = False

    def queue(self, work: Work) -> Done:
        work()
        return _AtOnce()

    def mark(self) -> None:
        pass

    def join(self) -> None:
        pass


class CudaLane:
    """A stream of one CUDA device. `mark` and `join` are called in the engine's thread, on the engine's stream."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._lock = threading.Lock()

    def queue(self, work: Work) -> Done:
        with self._lock, torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written)
            work()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            done.record(self._stream)
        return _Recorded(done)

    def mark(self) -> None:
        with self._lock:
            self._written.record(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _Buffer:
    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.free = threading.Lock()
        self.done: Done = _AtOnce()  # of the last work that uses it

    def rows(self, count: int, row_bytes: int) -> Tensor:
        return self.bytes[: count * row_bytes].view(count, row_bytes)


class Staging:
    """Moves rows of one dtype; a row is [scalars]. Larger moves go buffer by buffer."""

    def __init__(self, lane: Lane, buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.lane = lane
        self._ring = [_Buffer(buffer_bytes, lane.pinned) for _ in range(buffers)]
        self._next, self._lock = 0, threading.Lock()
        self._buffer_bytes = buffer_bytes

    def read(self, source: Tensor, index: NDArray[np.intp], out: NDArray[np.uint8]) -> None:
        """out [n, row bytes] in host memory = source[index], source [rows, scalars] on the device. Waits for it."""
        with torch.inference_mode():
            for first, end in self._pieces(*out.shape):
                with _Held(self._take()) as buffer:
                    staged = buffer.rows(end - first, out.shape[1])
                    host, rows = staged.view(source.dtype), torch.from_numpy(index[first:end])

                    def copy(host: Tensor = host, rows: Tensor = rows) -> None:
                        host.copy_(source[rows.to(source.device)], non_blocking=True)

                    buffer.done = self.lane.queue(copy)
                    buffer.done.wait()
                    out[first:end] = staged.numpy()

    def write(self, target: Tensor, index: NDArray[np.intp], payload: NDArray[np.uint8]) -> None:
        """target[index] = payload [n, row bytes] from host memory, which may be reused when this returns.

        The device's part is queued: `lane.join` orders what follows.
        """
        with torch.inference_mode():
            for first, end in self._pieces(*payload.shape):
                with _Held(self._take()) as buffer:
                    staged = buffer.rows(end - first, payload.shape[1])
                    staged.numpy()[:] = payload[first:end]
                    values, rows = staged.view(target.dtype), torch.from_numpy(index[first:end])

                    def copy(values: Tensor = values, rows: Tensor = rows) -> None:
                        on_device = values.to(target.device, non_blocking=True)
                        target.index_copy_(0, rows.to(target.device), on_device)

                    buffer.done = self.lane.queue(copy)

    def _pieces(self, rows: int, row_bytes: int) -> list[tuple[int, int]]:
        each = self._buffer_bytes // row_bytes
        if each < 1:
            raise Internal(f"a row of {row_bytes} bytes does not fit a buffer of {self._buffer_bytes}", field="staging")
        return [(first, min(first + each, rows)) for first in range(0, rows, each)]

    def _take(self) -> _Buffer:
        """The ring's next buffer, once nobody uses it."""
        with self._lock:
            buffer = self._ring[self._next]
            self._next = (self._next + 1) % len(self._ring)
        return buffer


class _Held:
    """A buffer for one thread, after its last copy has been done."""

    def __init__(self, buffer: _Buffer) -> None:
        self._buffer = buffer

    def __enter__(self) -> _Buffer:
        self._buffer.free.acquire()
        self._buffer.done.wait()
        return self._buffer

    def __exit__(self, *_: object) -> None:
        self._buffer.free.release()


def staging_for(device: torch.device) -> Staging | None:
    """None where the host sees the device's memory."""
    return Staging(CudaLane(device)) if device.type == "cuda" else None
