from pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("open", "retry")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    open: DecodeOpen
    retry: DecodeRetry
    def __init__(self, open: _Optional[_Union[DecodeOpen, _Mapping]] = ..., retry: _Optional[_Union[DecodeRetry, _Mapping]] = ...) -> None: ...

class DecodeOpen(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "adapter_digest", "prompt_ids", "output_ids", "forwarded_tokens", "sampling", "prefill_contract", "prefill_here", "choices", "handoff_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONTRACT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HERE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    adapter_digest: bytes
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    forwarded_tokens: int
    sampling: _common_pb2.SamplingOptions
    prefill_contract: _common_pb2.WorkerContract
    prefill_here: bool
    choices: _containers.RepeatedCompositeFieldContainer[OpenChoice]
    handoff_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter_digest: _Optional[bytes] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., forwarded_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingOptions, _Mapping]] = ..., prefill_contract: _Optional[_Union[_common_pb2.WorkerContract, _Mapping]] = ..., prefill_here: _Optional[bool] = ..., choices: _Optional[_Iterable[_Union[OpenChoice, _Mapping]]] = ..., handoff_tokens: _Optional[int] = ...) -> None: ...

class OpenChoice(_message.Message):
    __slots__ = ("choice", "output_ids", "forwarded_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    forwarded_tokens: int
    def __init__(self, choice: _Optional[int] = ..., output_ids: _Optional[_Iterable[int]] = ..., forwarded_tokens: _Optional[int] = ...) -> None: ...

class DecodeRetry(_message.Message):
    __slots__ = ("prefill_contract", "prefill_here")
    PREFILL_CONTRACT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HERE_FIELD_NUMBER: _ClassVar[int]
    prefill_contract: _common_pb2.WorkerContract
    prefill_here: bool
    def __init__(self, prefill_contract: _Optional[_Union[_common_pb2.WorkerContract, _Mapping]] = ..., prefill_here: _Optional[bool] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("admitted", "ticket", "tokens", "finish", "error", "prefilled")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    ticket: _common_pb2.Ticket
    tokens: _common_pb2.TokenBatch
    finish: _common_pb2.Finish
    error: _common_pb2.ErrorDetail
    prefilled: Prefilled
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., tokens: _Optional[_Union[_common_pb2.TokenBatch, _Mapping]] = ..., finish: _Optional[_Union[_common_pb2.Finish, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("ticket", "identity", "contract", "logits_only", "conversions", "prefill_here")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    LOGITS_ONLY_FIELD_NUMBER: _ClassVar[int]
    CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HERE_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    identity: _common_pb2.HandoffIdentity
    contract: _common_pb2.WorkerContract
    logits_only: bool
    conversions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Difference]
    prefill_here: bool
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.HandoffIdentity, _Mapping]] = ..., contract: _Optional[_Union[_common_pb2.WorkerContract, _Mapping]] = ..., logits_only: _Optional[bool] = ..., conversions: _Optional[_Iterable[_Union[_common_pb2.Difference, _Mapping]]] = ..., prefill_here: _Optional[bool] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("computed_tokens", "cached_tokens", "queued_ms", "prefill_ms", "chunks")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    cached_tokens: int
    queued_ms: float
    prefill_ms: float
    chunks: int
    def __init__(self, computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queued_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., chunks: _Optional[int] = ...) -> None: ...
