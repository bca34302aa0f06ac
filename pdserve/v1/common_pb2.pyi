from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DifferenceClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIFFERENCE_CLASS_UNSPECIFIED: _ClassVar[DifferenceClass]
    DIFFERENCE_CLASS_MUST_EQUAL: _ClassVar[DifferenceClass]
    DIFFERENCE_CLASS_CONVERTIBLE: _ClassVar[DifferenceClass]
    DIFFERENCE_CLASS_LOSSY: _ClassVar[DifferenceClass]
    DIFFERENCE_CLASS_INFORMATIONAL: _ClassVar[DifferenceClass]
DIFFERENCE_CLASS_UNSPECIFIED: DifferenceClass
DIFFERENCE_CLASS_MUST_EQUAL: DifferenceClass
DIFFERENCE_CLASS_CONVERTIBLE: DifferenceClass
DIFFERENCE_CLASS_LOSSY: DifferenceClass
DIFFERENCE_CLASS_INFORMATIONAL: DifferenceClass

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "field", "remedy", "retryable", "differences", "code", "retry_after_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    field: str
    remedy: str
    retryable: bool
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    code: int
    retry_after_ms: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., remedy: _Optional[str] = ..., retryable: _Optional[bool] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., code: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("code", "left", "right")
    CODE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    CLASS_FIELD_NUMBER: _ClassVar[int]
    code: str
    left: str
    right: str
    def __init__(self, code: _Optional[str] = ..., left: _Optional[str] = ..., right: _Optional[str] = ..., **kwargs) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "address", "authority", "first_layer", "end_layer", "first_head", "end_head")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    END_HEAD_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    authority: str
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., authority: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., first_head: _Optional[int] = ..., end_head: _Optional[int] = ...) -> None: ...

class PositionScheme(_message.Message):
    __slots__ = ("kind", "theta", "dims", "scaling", "scaling_parameters", "original_max_positions", "interleaved", "keys_cached_rotated")
    class ScalingParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    THETA_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    SCALING_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVED_FIELD_NUMBER: _ClassVar[int]
    KEYS_CACHED_ROTATED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    theta: float
    dims: int
    scaling: str
    scaling_parameters: _containers.ScalarMap[str, float]
    original_max_positions: int
    interleaved: bool
    keys_cached_rotated: bool
    def __init__(self, kind: _Optional[str] = ..., theta: _Optional[float] = ..., dims: _Optional[int] = ..., scaling: _Optional[str] = ..., scaling_parameters: _Optional[_Mapping[str, float]] = ..., original_max_positions: _Optional[int] = ..., interleaved: _Optional[bool] = ..., keys_cached_rotated: _Optional[bool] = ...) -> None: ...

class AttentionScheme(_message.Message):
    __slots__ = ("scale", "soft_cap", "sliding_window")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    scale: float
    soft_cap: float
    sliding_window: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, scale: _Optional[float] = ..., soft_cap: _Optional[float] = ..., sliding_window: _Optional[_Iterable[int]] = ...) -> None: ...

class CachePlane(_message.Message):
    __slots__ = ("name", "heads", "head_dim")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    name: str
    heads: int
    head_dim: int
    def __init__(self, name: _Optional[str] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ...) -> None: ...

class LayerPlanes(_message.Message):
    __slots__ = ("planes",)
    PLANES_FIELD_NUMBER: _ClassVar[int]
    planes: _containers.RepeatedCompositeFieldContainer[CachePlane]
    def __init__(self, planes: _Optional[_Iterable[_Union[CachePlane, _Mapping]]] = ...) -> None: ...

class WorkerContract(_message.Message):
    __slots__ = ("version", "model_digest", "positions", "attention", "layers", "vocab_size", "tokenizer_digest", "page_size", "page_axis_order", "device", "kv_dtype", "weight_dtype", "activation_dtype", "info", "context_limit", "allow_lossy", "layer_positions")
    class InfoEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_AXIS_ORDER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_LOSSY_FIELD_NUMBER: _ClassVar[int]
    LAYER_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    version: int
    model_digest: bytes
    positions: PositionScheme
    attention: AttentionScheme
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlanes]
    vocab_size: int
    tokenizer_digest: bytes
    page_size: int
    page_axis_order: str
    device: str
    kv_dtype: str
    weight_dtype: str
    activation_dtype: str
    info: _containers.ScalarMap[str, str]
    context_limit: int
    allow_lossy: bool
    layer_positions: _containers.RepeatedCompositeFieldContainer[PositionScheme]
    def __init__(self, version: _Optional[int] = ..., model_digest: _Optional[bytes] = ..., positions: _Optional[_Union[PositionScheme, _Mapping]] = ..., attention: _Optional[_Union[AttentionScheme, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[LayerPlanes, _Mapping]]] = ..., vocab_size: _Optional[int] = ..., tokenizer_digest: _Optional[bytes] = ..., page_size: _Optional[int] = ..., page_axis_order: _Optional[str] = ..., device: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., weight_dtype: _Optional[str] = ..., activation_dtype: _Optional[str] = ..., info: _Optional[_Mapping[str, str]] = ..., context_limit: _Optional[int] = ..., allow_lossy: _Optional[bool] = ..., layer_positions: _Optional[_Iterable[_Union[PositionScheme, _Mapping]]] = ...) -> None: ...

class HandoffIdentity(_message.Message):
    __slots__ = ("contract_digest", "adapter_digest", "tenant", "prompt_digest", "start", "end")
    CONTRACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    contract_digest: bytes
    adapter_digest: bytes
    tenant: str
    prompt_digest: bytes
    start: int
    end: int
    def __init__(self, contract_digest: _Optional[bytes] = ..., adapter_digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., prompt_digest: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("handoff_id", "attempt", "incarnation", "secret", "ttl_ms", "held_tokens", "endpoints")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    attempt: int
    incarnation: bytes
    secret: bytes
    ttl_ms: int
    held_tokens: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, handoff_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., held_tokens: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "json_schema", "regex", "lark", "skip_special_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int
    json_schema: str
    regex: str
    lark: str
    skip_special_tokens: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob", "rank")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    rank: int
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("first_index", "ids", "text", "logprobs", "choice")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    text: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    choice: int
    def __init__(self, first_index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., text: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., choice: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "choice", "shared_pages", "copied_pages")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAGES_FIELD_NUMBER: _ClassVar[int]
    COPIED_PAGES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    stop_string: str
    stop_token_id: int
    usage: Usage
    choice: int
    shared_pages: int
    copied_pages: int
    def __init__(self, reason: _Optional[str] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., choice: _Optional[int] = ..., shared_pages: _Optional[int] = ..., copied_pages: _Optional[int] = ...) -> None: ...

class GroupPair(_message.Message):
    __slots__ = ("prefill_workers", "decode_workers", "prefill_count", "decode_count", "differences")
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    prefill_workers: _containers.RepeatedScalarFieldContainer[str]
    decode_workers: _containers.RepeatedScalarFieldContainer[str]
    prefill_count: int
    decode_count: int
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    def __init__(self, prefill_workers: _Optional[_Iterable[str]] = ..., decode_workers: _Optional[_Iterable[str]] = ..., prefill_count: _Optional[int] = ..., decode_count: _Optional[int] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ...) -> None: ...

class AttemptRecord(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "prefill_candidates", "decode_candidates", "prefill_cost", "decode_cost", "outcome", "failed_worker", "first_index", "output_tokens", "begun_ms", "admitted_ms", "first_token_ms", "total_ms", "computed_tokens", "sent_tokens", "bytes_sent", "frames_sent", "queued_ms", "prefill_ms", "push_ms", "transfer_ms", "placement", "placement_reason", "predicted_handoff_ms", "predicted_decode_ms", "decode_penalty_ms", "predicted_split_ms", "handoff_tokens")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    DECODE_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COST_FIELD_NUMBER: _ClassVar[int]
    DECODE_COST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILED_WORKER_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_MS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_SENT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    PUSH_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_PENALTY_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SPLIT_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    prefill_candidates: int
    decode_candidates: int
    prefill_cost: float
    decode_cost: float
    outcome: str
    failed_worker: str
    first_index: int
    output_tokens: int
    begun_ms: float
    admitted_ms: float
    first_token_ms: float
    total_ms: float
    computed_tokens: int
    sent_tokens: int
    bytes_sent: int
    frames_sent: int
    queued_ms: float
    prefill_ms: float
    push_ms: float
    transfer_ms: float
    placement: str
    placement_reason: str
    predicted_handoff_ms: float
    predicted_decode_ms: float
    decode_penalty_ms: float
    predicted_split_ms: float
    handoff_tokens: int
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., prefill_candidates: _Optional[int] = ..., decode_candidates: _Optional[int] = ..., prefill_cost: _Optional[float] = ..., decode_cost: _Optional[float] = ..., outcome: _Optional[str] = ..., failed_worker: _Optional[str] = ..., first_index: _Optional[int] = ..., output_tokens: _Optional[int] = ..., begun_ms: _Optional[float] = ..., admitted_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., sent_tokens: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., frames_sent: _Optional[int] = ..., queued_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., push_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., placement: _Optional[str] = ..., placement_reason: _Optional[str] = ..., predicted_handoff_ms: _Optional[float] = ..., predicted_decode_ms: _Optional[float] = ..., decode_penalty_ms: _Optional[float] = ..., predicted_split_ms: _Optional[float] = ..., handoff_tokens: _Optional[int] = ...) -> None: ...

class HandoffRecord(_message.Message):
    __slots__ = ("request_id", "prefill_worker", "decode_worker", "attempts", "prompt_tokens", "computed_tokens", "sent_tokens", "bytes_sent", "frames_sent", "queued_ms", "prefill_ms", "transfer_ms", "first_token_ms", "decode_tokens_per_s", "conversions", "notes", "output_tokens", "outcome", "intake_ms", "admitted_ms", "push_ms", "decode_ms", "total_ms", "candidates", "rejected", "history", "choices", "prefills", "transfers", "shared_pages", "copied_pages", "trace_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_SENT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    INTAKE_MS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_MS_FIELD_NUMBER: _ClassVar[int]
    PUSH_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAGES_FIELD_NUMBER: _ClassVar[int]
    COPIED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill_worker: str
    decode_worker: str
    attempts: int
    prompt_tokens: int
    computed_tokens: int
    sent_tokens: int
    bytes_sent: int
    frames_sent: int
    queued_ms: float
    prefill_ms: float
    transfer_ms: float
    first_token_ms: float
    decode_tokens_per_s: float
    conversions: _containers.RepeatedCompositeFieldContainer[Difference]
    notes: _containers.RepeatedScalarFieldContainer[str]
    output_tokens: int
    outcome: str
    intake_ms: float
    admitted_ms: float
    push_ms: float
    decode_ms: float
    total_ms: float
    candidates: _containers.RepeatedCompositeFieldContainer[GroupPair]
    rejected: _containers.RepeatedCompositeFieldContainer[GroupPair]
    history: _containers.RepeatedCompositeFieldContainer[AttemptRecord]
    choices: int
    prefills: int
    transfers: int
    shared_pages: int
    copied_pages: int
    trace_id: str
    def __init__(self, request_id: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempts: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., sent_tokens: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., frames_sent: _Optional[int] = ..., queued_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., conversions: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., output_tokens: _Optional[int] = ..., outcome: _Optional[str] = ..., intake_ms: _Optional[float] = ..., admitted_ms: _Optional[float] = ..., push_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., candidates: _Optional[_Iterable[_Union[GroupPair, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[GroupPair, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[AttemptRecord, _Mapping]]] = ..., choices: _Optional[int] = ..., prefills: _Optional[int] = ..., transfers: _Optional[int] = ..., shared_pages: _Optional[int] = ..., copied_pages: _Optional[int] = ..., trace_id: _Optional[str] = ...) -> None: ...

class LoadedAdapter(_message.Message):
    __slots__ = ("name", "digest", "users", "rank", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    users: int
    rank: int
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., users: _Optional[int] = ..., rank: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
