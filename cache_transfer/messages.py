"""What travels on one Push stream, as plain values. `push.py` turns them into bytes and back.

sender    PushOpening, (PackedFrames | Queued)*, Logits, Commit
receiver  Grant, Release*, Ack
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cache_transfer.contract import HandoffIdentity, WorkerContract
from cache_transfer.pages import Range

INTEGRITY = "blake3-keyed"
MAX_PAYLOAD_BYTES = 1 << 20  # of one frame
MAX_FRAMES = 64  # of one message


@dataclass(frozen=True)
class SharedMemory:
    """An open file of the sender's process that a receiver on its machine may read; see shared.py."""

    pid: int
    fd: int
    size: int  # bytes
    entries: int = 0  # of its queue, see shared_queue.py; 0: there is none


@dataclass(frozen=True)
class PushOpening:
    """First message: which ticket is claimed, for which cache, by a sender of which contract."""

    handoff_id: bytes
    attempt: int
    incarnation: bytes
    proof: bytes  # see digests.proof
    identity: HandoffIdentity
    contract: WorkerContract
    kv_dtype: str
    logits_only: bool
    integrity: str = INTEGRITY
    shared: SharedMemory | None = None  # an offer


@dataclass(frozen=True)
class FrameHeader:
    """What a frame holds. `seq` counts the frames of one stream from 0."""

    plane: str
    layer: int
    heads: Range
    tokens: Range
    seq: int
    dtype: str


@dataclass(frozen=True)
class Unpacked:
    """A frame before its payload was read."""

    header: bytes
    payload_bytes: int
    fill: Callable[[memoryview], None]  # writes the payload there, and keeps no view of it


@dataclass(frozen=True)
class Frame:
    """A frame as received: views of the received message, nothing checked yet."""

    header: memoryview
    payload: memoryview  # canonical, see pages.py
    digest: bytes

    @property
    def size(self) -> int:
        return len(self.payload)


@dataclass(frozen=True)
class Frames:
    """Consecutive frames in one message; at least one, at most MAX_FRAMES."""

    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class SharedFrame:
    """A frame whose payload lies in the sender's memory."""

    header: bytes
    offset: int
    size: int
    digest: bytes


@dataclass(frozen=True)
class SharedFrames:
    """Consecutive frames in one message; at least one."""

    frames: tuple[SharedFrame, ...]


@dataclass(frozen=True)
class Queued:
    """The first `frames` frames of the stream stand in the queue in shared memory."""

    frames: int


@dataclass(frozen=True)
class PackedFrames:
    """One message with consecutive frames, in the form its transport sends."""

    data: bytes | Frame | Frames | SharedFrames
    frames: tuple[tuple[bytes, int], ...]  # digest and payload bytes of each


@dataclass(frozen=True)
class Logits:
    """Raw scores [vocab_size] of the first output token, little endian."""

    dtype: str
    data: bytes
    position: int  # index of the prompt token they were taken at
    digest: bytes


@dataclass(frozen=True)
class Commit:
    """The manifest: what the sender says it sent."""

    frames: int
    payload_bytes: int
    start: int
    end: int
    digest: bytes


@dataclass(frozen=True)
class Grant:
    """The receiver holds pages for tokens [start, end); an empty range: no frames."""

    start: int
    end: int
    max_payload_bytes: int
    shared: bool = False  # the offered memory will be read
    max_frames: int = 1  # in one message
    queue: bool = False  # frames come through the offered memory's queue, and in no other way


@dataclass(frozen=True)
class Release:
    """The first `frames` frames of the stream are in pages: their shared memory may be filled anew."""

    frames: int


@dataclass(frozen=True)
class Ack:
    """Every byte verified."""

    frames: int
    payload_bytes: int


Request = PushOpening | Frame | Frames | SharedFrames | Queued | Logits | Commit
Outgoing = PushOpening | PackedFrames | Queued | Logits | Commit
Response = Grant | Release | Ack
