from pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunRequest(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "adapter_digest", "prompt_ids", "output_ids", "ticket", "identity", "logits_only", "decode_contract")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LOGITS_ONLY_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTRACT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    adapter_digest: bytes
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    ticket: _common_pb2.Ticket
    identity: _common_pb2.HandoffIdentity
    logits_only: bool
    decode_contract: _common_pb2.WorkerContract
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter_digest: _Optional[bytes] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.HandoffIdentity, _Mapping]] = ..., logits_only: _Optional[bool] = ..., decode_contract: _Optional[_Union[_common_pb2.WorkerContract, _Mapping]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("computed_tokens", "cached_tokens", "sent_tokens", "bytes_sent", "frames_sent", "queued_ms", "prefill_ms", "transfer_ms", "chunks", "push_ms")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_SENT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PUSH_MS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    cached_tokens: int
    sent_tokens: int
    bytes_sent: int
    frames_sent: int
    queued_ms: float
    prefill_ms: float
    transfer_ms: float
    chunks: int
    push_ms: float
    def __init__(self, computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., sent_tokens: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., frames_sent: _Optional[int] = ..., queued_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., chunks: _Optional[int] = ..., push_ms: _Optional[float] = ...) -> None: ...
