from pdserve.v1 import common_pb2 as _common_pb2
from pdserve.v1 import gateway_pb2 as _gateway_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRecord(_message.Message):
    __slots__ = ("status", "incarnation", "transfer", "lease_ms")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    status: _gateway_pb2.WorkerStatus
    incarnation: bytes
    transfer: _containers.RepeatedCompositeFieldContainer[_common_pb2.Endpoint]
    lease_ms: int
    def __init__(self, status: _Optional[_Union[_gateway_pb2.WorkerStatus, _Mapping]] = ..., incarnation: _Optional[bytes] = ..., transfer: _Optional[_Iterable[_Union[_common_pb2.Endpoint, _Mapping]]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("record", "again")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    again: bool
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., again: _Optional[bool] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "state", "load", "answer")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: bytes
    state: str
    load: _gateway_pb2.Load
    answer: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., state: _Optional[str] = ..., load: _Optional[_Union[_gateway_pb2.Load, _Mapping]] = ..., answer: _Optional[bool] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[WorkerRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[WorkerRecord, _Mapping]]] = ...) -> None: ...

class SentPrefixes(_message.Message):
    __slots__ = ("sent",)
    SENT_FIELD_NUMBER: _ClassVar[int]
    sent: _containers.RepeatedCompositeFieldContainer[SentPrefix]
    def __init__(self, sent: _Optional[_Iterable[_Union[SentPrefix, _Mapping]]] = ...) -> None: ...

class SentPrefix(_message.Message):
    __slots__ = ("incarnations", "links")
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[bytes]
    links: bytes
    def __init__(self, incarnations: _Optional[_Iterable[bytes]] = ..., links: _Optional[bytes] = ...) -> None: ...

class TenantsUsed(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsed]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUsed, _Mapping]]] = ...) -> None: ...

class TenantUsed(_message.Message):
    __slots__ = ("tenant", "requests", "tokens", "running", "requests_owed", "tokens_owed")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_OWED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OWED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    requests: int
    tokens: int
    running: int
    requests_owed: float
    tokens_owed: float
    def __init__(self, tenant: _Optional[str] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., running: _Optional[int] = ..., requests_owed: _Optional[float] = ..., tokens_owed: _Optional[float] = ...) -> None: ...
