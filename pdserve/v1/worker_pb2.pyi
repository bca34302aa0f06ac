from pdserve.v1 import common_pb2 as _common_pb2
from pdserve.v1 import gateway_pb2 as _gateway_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class BundlePiece(_message.Message):
    __slots__ = ("data", "total_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    total_bytes: int
    def __init__(self, data: _Optional[bytes] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class AccountsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Holding(_message.Message):
    __slots__ = ("owner", "kind", "pages", "deadline_left_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    owner: str
    kind: str
    pages: int
    deadline_left_s: float
    def __init__(self, owner: _Optional[str] = ..., kind: _Optional[str] = ..., pages: _Optional[int] = ..., deadline_left_s: _Optional[float] = ...) -> None: ...

class AccountsResponse(_message.Message):
    __slots__ = ("pages_total", "pages_free", "pages_held", "pages_cached", "holdings", "intact", "fault", "preemptions", "recomputed_tokens", "handoffs", "forks", "shared_pages", "copied_pages")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    INTACT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAGES_FIELD_NUMBER: _ClassVar[int]
    COPIED_PAGES_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    pages_held: int
    pages_cached: int
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    intact: bool
    fault: str
    preemptions: int
    recomputed_tokens: int
    handoffs: int
    forks: int
    shared_pages: int
    copied_pages: int
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_held: _Optional[int] = ..., pages_cached: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., intact: _Optional[bool] = ..., fault: _Optional[str] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., handoffs: _Optional[int] = ..., forks: _Optional[int] = ..., shared_pages: _Optional[int] = ..., copied_pages: _Optional[int] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("token_ids", "chunk_tokens", "columns")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    chunk_tokens: int
    columns: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., chunk_tokens: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class TraceFault(_message.Message):
    __slots__ = ("check", "message")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    check: str
    message: str
    def __init__(self, check: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class TraceStart(_message.Message):
    __slots__ = ("positions", "cached", "faults")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    cached: _containers.RepeatedScalarFieldContainer[int]
    faults: _containers.RepeatedCompositeFieldContainer[TraceFault]
    def __init__(self, positions: _Optional[_Iterable[int]] = ..., cached: _Optional[_Iterable[int]] = ..., faults: _Optional[_Iterable[_Union[TraceFault, _Mapping]]] = ...) -> None: ...

class TraceRows(_message.Message):
    __slots__ = ("layer", "tensor", "shape", "columns", "dtype", "norms")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    tensor: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    columns: int
    dtype: str
    norms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[int] = ..., tensor: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., columns: _Optional[int] = ..., dtype: _Optional[str] = ..., norms: _Optional[_Iterable[float]] = ...) -> None: ...

class TracePart(_message.Message):
    __slots__ = ("start", "rows", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: TraceStart
    rows: TraceRows
    data: bytes
    def __init__(self, start: _Optional[_Union[TraceStart, _Mapping]] = ..., rows: _Optional[_Union[TraceRows, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class PartReport(_message.Message):
    __slots__ = ("version", "clock_ms", "certificates")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    version: str
    clock_ms: int
    certificates: _containers.RepeatedCompositeFieldContainer[CertificateReport]
    def __init__(self, version: _Optional[str] = ..., clock_ms: _Optional[int] = ..., certificates: _Optional[_Iterable[_Union[CertificateReport, _Mapping]]] = ...) -> None: ...

class CertificateReport(_message.Message):
    __slots__ = ("listener", "names", "not_after_s", "authority_not_after_s", "error")
    LISTENER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_NOT_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    listener: str
    names: _containers.RepeatedScalarFieldContainer[str]
    not_after_s: int
    authority_not_after_s: int
    error: _common_pb2.ErrorDetail
    def __init__(self, listener: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., not_after_s: _Optional[int] = ..., authority_not_after_s: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class PathReport(_message.Message):
    __slots__ = ("decode_worker", "address", "ms", "error")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    address: str
    ms: float
    error: _common_pb2.ErrorDetail
    def __init__(self, decode_worker: _Optional[str] = ..., address: _Optional[str] = ..., ms: _Optional[float] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("part", "worker_id", "incarnation", "lease_s", "registry_ms", "registry_error", "paths", "paths_left_out", "kernels", "kernels_why", "cache_folder", "cache_free_bytes")
    PART_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_MS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_ERROR_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    PATHS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_WHY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FOLDER_FIELD_NUMBER: _ClassVar[int]
    CACHE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    part: PartReport
    worker_id: str
    incarnation: bytes
    lease_s: float
    registry_ms: float
    registry_error: _common_pb2.ErrorDetail
    paths: _containers.RepeatedCompositeFieldContainer[PathReport]
    paths_left_out: int
    kernels: str
    kernels_why: str
    cache_folder: str
    cache_free_bytes: int
    def __init__(self, part: _Optional[_Union[PartReport, _Mapping]] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., registry_ms: _Optional[float] = ..., registry_error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., paths: _Optional[_Iterable[_Union[PathReport, _Mapping]]] = ..., paths_left_out: _Optional[int] = ..., kernels: _Optional[str] = ..., kernels_why: _Optional[str] = ..., cache_folder: _Optional[str] = ..., cache_free_bytes: _Optional[int] = ...) -> None: ...
