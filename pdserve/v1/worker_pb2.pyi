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
    __slots__ = ("pages_total", "pages_free", "pages_held", "pages_cached", "holdings", "intact", "fault")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    INTACT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    pages_held: int
    pages_cached: int
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    intact: bool
    fault: str
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_held: _Optional[int] = ..., pages_cached: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., intact: _Optional[bool] = ..., fault: _Optional[str] = ...) -> None: ...
