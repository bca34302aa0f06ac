from pdserve.v1 import common_pb2 as _common_pb2
from pdserve.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExamineRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class ExaminePart(_message.Message):
    __slots__ = ("router", "worker")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    router: RouterReport
    worker: WorkerReport
    def __init__(self, router: _Optional[_Union[RouterReport, _Mapping]] = ..., worker: _Optional[_Union[WorkerReport, _Mapping]] = ...) -> None: ...

class RouterReport(_message.Message):
    __slots__ = ("part", "registry_ms", "registry_error")
    PART_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_MS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_ERROR_FIELD_NUMBER: _ClassVar[int]
    part: _worker_pb2.PartReport
    registry_ms: float
    registry_error: _common_pb2.ErrorDetail
    def __init__(self, part: _Optional[_Union[_worker_pb2.PartReport, _Mapping]] = ..., registry_ms: _Optional[float] = ..., registry_error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("worker_id", "suspect", "clock_ms", "probe", "accounts", "error")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    suspect: bool
    clock_ms: int
    probe: _worker_pb2.ProbeResponse
    accounts: _worker_pb2.AccountsResponse
    error: _common_pb2.ErrorDetail
    def __init__(self, worker_id: _Optional[str] = ..., suspect: _Optional[bool] = ..., clock_ms: _Optional[int] = ..., probe: _Optional[_Union[_worker_pb2.ProbeResponse, _Mapping]] = ..., accounts: _Optional[_Union[_worker_pb2.AccountsResponse, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class CanaryRequest(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ...) -> None: ...

class CanaryResponse(_message.Message):
    __slots__ = ("token_ids", "gaps", "attempt", "error")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    gaps: _containers.RepeatedScalarFieldContainer[float]
    attempt: _common_pb2.AttemptRecord
    error: _common_pb2.ErrorDetail
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., gaps: _Optional[_Iterable[float]] = ..., attempt: _Optional[_Union[_common_pb2.AttemptRecord, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
