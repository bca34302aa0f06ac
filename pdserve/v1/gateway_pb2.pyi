from pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls_json", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls_json: str
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls_json: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "tools_json", "continue_final_message", "variables_json", "tool_mode", "tool_function", "parallel_tool_calls", "add_generation_prompt")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_MODE_FIELD_NUMBER: _ClassVar[int]
    TOOL_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    continue_final_message: bool
    variables_json: str
    tool_mode: str
    tool_function: str
    parallel_tool_calls: bool
    add_generation_prompt: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., continue_final_message: _Optional[bool] = ..., variables_json: _Optional[str] = ..., tool_mode: _Optional[str] = ..., tool_function: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ListedPrompt(_message.Message):
    __slots__ = ("text", "tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: TokenPrompt
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ...) -> None: ...

class PromptList(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[ListedPrompt]
    def __init__(self, prompts: _Optional[_Iterable[_Union[ListedPrompt, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "tokens", "several", "sampling", "request_id", "adapter", "want_record", "n", "echo", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WANT_RECORD_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    tokens: TokenPrompt
    several: PromptList
    sampling: _common_pb2.SamplingOptions
    request_id: str
    adapter: str
    want_record: bool
    n: int
    echo: bool
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., several: _Optional[_Union[PromptList, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingOptions, _Mapping]] = ..., request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., want_record: _Optional[bool] = ..., n: _Optional[int] = ..., echo: _Optional[bool] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("accepted", "tokens", "record", "finish", "error", "usage", "tool_calls")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    tokens: _common_pb2.TokenBatch
    record: _common_pb2.HandoffRecord
    finish: _common_pb2.Finish
    error: _common_pb2.ErrorDetail
    usage: _common_pb2.Usage
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallPart]
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., tokens: _Optional[_Union[_common_pb2.TokenBatch, _Mapping]] = ..., record: _Optional[_Union[_common_pb2.HandoffRecord, _Mapping]] = ..., finish: _Optional[_Union[_common_pb2.Finish, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallPart, _Mapping]]] = ...) -> None: ...

class ToolCallPart(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "seed", "prompt", "read_fields")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    READ_FIELDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt: int
    read_fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., prompt: _Optional[int] = ..., read_fields: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "context_limit", "vocab_size", "model_digest", "has_tokenizer", "has_chat_template", "created_s", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_limit: int
    vocab_size: int
    model_digest: bytes
    has_tokenizer: bool
    has_chat_template: bool
    created_s: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., context_limit: _Optional[int] = ..., vocab_size: _Optional[int] = ..., model_digest: _Optional[bytes] = ..., has_tokenizer: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ..., created_s: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("recent",)
    RECENT_FIELD_NUMBER: _ClassVar[int]
    recent: int
    def __init__(self, recent: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "state", "model", "endpoints", "contract", "contract_digest", "load", "lease_left_s", "takes_prompts", "capabilities", "adapters", "metrics")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    TAKES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    state: str
    model: str
    endpoints: _containers.RepeatedCompositeFieldContainer[_common_pb2.Endpoint]
    contract: _common_pb2.WorkerContract
    contract_digest: bytes
    load: Load
    lease_left_s: float
    takes_prompts: bool
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedCompositeFieldContainer[_common_pb2.LoadedAdapter]
    metrics: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[_common_pb2.Endpoint, _Mapping]]] = ..., contract: _Optional[_Union[_common_pb2.WorkerContract, _Mapping]] = ..., contract_digest: _Optional[bytes] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., lease_left_s: _Optional[float] = ..., takes_prompts: _Optional[bool] = ..., capabilities: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[_Union[_common_pb2.LoadedAdapter, _Mapping]]] = ..., metrics: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "waiting_limit", "queued_tokens", "pages_total", "pages_held", "pages_cached", "tokens_per_s", "steps", "prefill_tokens_per_s", "shared_prefill_tokens_per_s", "queued_prefill_tokens", "predicted_wait_s", "transfer_bytes_per_s", "decode_step_ms", "fixed_step_ms", "prefill_token_us", "prefill_pair_ns", "step_ms", "batch_limit", "chunk_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_LIMIT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHARED_PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    FIXED_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_limit: int
    queued_tokens: int
    pages_total: int
    pages_held: int
    pages_cached: int
    tokens_per_s: float
    steps: int
    prefill_tokens_per_s: float
    shared_prefill_tokens_per_s: float
    queued_prefill_tokens: int
    predicted_wait_s: float
    transfer_bytes_per_s: float
    decode_step_ms: float
    fixed_step_ms: float
    prefill_token_us: float
    prefill_pair_ns: float
    step_ms: float
    batch_limit: int
    chunk_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_limit: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_held: _Optional[int] = ..., pages_cached: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., steps: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., shared_prefill_tokens_per_s: _Optional[float] = ..., queued_prefill_tokens: _Optional[int] = ..., predicted_wait_s: _Optional[float] = ..., transfer_bytes_per_s: _Optional[float] = ..., decode_step_ms: _Optional[float] = ..., fixed_step_ms: _Optional[float] = ..., prefill_token_us: _Optional[float] = ..., prefill_pair_ns: _Optional[float] = ..., step_ms: _Optional[float] = ..., batch_limit: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "fits", "differences")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    fits: bool
    differences: _containers.RepeatedCompositeFieldContainer[_common_pb2.Difference]
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., fits: _Optional[bool] = ..., differences: _Optional[_Iterable[_Union[_common_pb2.Difference, _Mapping]]] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("workers", "pairs", "registry", "registry_warning", "active_requests", "version", "placement", "recent", "reduced")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_WARNING_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    pairs: _containers.RepeatedCompositeFieldContainer[Pair]
    registry: str
    registry_warning: str
    active_requests: int
    version: str
    placement: PlacementCounts
    recent: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    reduced: bool
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., registry: _Optional[str] = ..., registry_warning: _Optional[str] = ..., active_requests: _Optional[int] = ..., version: _Optional[str] = ..., placement: _Optional[_Union[PlacementCounts, _Mapping]] = ..., recent: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ..., reduced: _Optional[bool] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "adapter", "label", "began_s", "age_ms", "state", "record")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    adapter: str
    label: str
    began_s: float
    age_ms: float
    state: str
    record: _common_pb2.HandoffRecord
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., label: _Optional[str] = ..., began_s: _Optional[float] = ..., age_ms: _Optional[float] = ..., state: _Optional[str] = ..., record: _Optional[_Union[_common_pb2.HandoffRecord, _Mapping]] = ...) -> None: ...

class PlacementCounts(_message.Message):
    __slots__ = ("disaggregate", "handed_over", "computed_at_decode", "fallbacks", "cheaper", "predictions", "bounds", "ratios", "split")
    DISAGGREGATE_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_AT_DECODE_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    CHEAPER_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    RATIOS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    disaggregate: str
    handed_over: int
    computed_at_decode: int
    fallbacks: int
    cheaper: int
    predictions: int
    bounds: _containers.RepeatedScalarFieldContainer[float]
    ratios: _containers.RepeatedScalarFieldContainer[int]
    split: int
    def __init__(self, disaggregate: _Optional[str] = ..., handed_over: _Optional[int] = ..., computed_at_decode: _Optional[int] = ..., fallbacks: _Optional[int] = ..., cheaper: _Optional[int] = ..., predictions: _Optional[int] = ..., bounds: _Optional[_Iterable[float]] = ..., ratios: _Optional[_Iterable[int]] = ..., split: _Optional[int] = ...) -> None: ...
