from pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushRequest(_message.Message):
    __slots__ = ("open", "frame", "logits", "commit", "shared", "frames", "queued")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    open: PushOpen
    frame: Frame
    logits: Logits
    commit: Commit
    shared: SharedFrames
    frames: Frames
    queued: Queued
    def __init__(self, open: _Optional[_Union[PushOpen, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., logits: _Optional[_Union[Logits, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., shared: _Optional[_Union[SharedFrames, _Mapping]] = ..., frames: _Optional[_Union[Frames, _Mapping]] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ...) -> None: ...

class PushOpen(_message.Message):
    __slots__ = ("handoff_id", "attempt", "incarnation", "proof", "identity", "contract", "kv_dtype", "logits_only", "integrity", "shared")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_ONLY_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    attempt: int
    incarnation: bytes
    proof: bytes
    identity: _common_pb2.HandoffIdentity
    contract: _common_pb2.WorkerContract
    kv_dtype: str
    logits_only: bool
    integrity: str
    shared: SharedMemory
    def __init__(self, handoff_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., identity: _Optional[_Union[_common_pb2.HandoffIdentity, _Mapping]] = ..., contract: _Optional[_Union[_common_pb2.WorkerContract, _Mapping]] = ..., kv_dtype: _Optional[str] = ..., logits_only: _Optional[bool] = ..., integrity: _Optional[str] = ..., shared: _Optional[_Union[SharedMemory, _Mapping]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("header", "payload", "digest")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    payload: bytes
    digest: bytes
    def __init__(self, header: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("pid", "fd", "size", "entries")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    size: int
    entries: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., size: _Optional[int] = ..., entries: _Optional[int] = ...) -> None: ...

class SharedFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[SharedFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[SharedFrame, _Mapping]]] = ...) -> None: ...

class SharedFrame(_message.Message):
    __slots__ = ("header", "offset", "size", "digest")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    offset: int
    size: int
    digest: bytes
    def __init__(self, header: _Optional[bytes] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: int
    def __init__(self, frames: _Optional[int] = ...) -> None: ...

class Logits(_message.Message):
    __slots__ = ("dtype", "data", "position", "digest")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    data: bytes
    position: int
    digest: bytes
    def __init__(self, dtype: _Optional[str] = ..., data: _Optional[bytes] = ..., position: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("frames", "payload_bytes", "start", "end", "digest")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    frames: int
    payload_bytes: int
    start: int
    end: int
    digest: bytes
    def __init__(self, frames: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("grant", "ack", "release")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    ack: Ack
    release: Release
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("start", "end", "max_payload_bytes", "shared", "max_frames", "queue")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MAX_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    max_payload_bytes: int
    shared: bool
    max_frames: int
    queue: bool
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., max_payload_bytes: _Optional[int] = ..., shared: _Optional[bool] = ..., max_frames: _Optional[int] = ..., queue: _Optional[bool] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: int
    def __init__(self, frames: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("frames", "payload_bytes")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    frames: int
    payload_bytes: int
    def __init__(self, frames: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...
