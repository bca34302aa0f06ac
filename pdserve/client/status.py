"""Models, pools and pairs as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from pdserve.errors import FieldDifference
from pdserve.rpc.convert import record_from_proto
from pdserve.rpc.events import HandoffRecord
from pdserve.rpc.status import difference_from_proto
from pdserve.v1 import common_pb2, gateway_pb2


@dataclass(frozen=True)
class Model:
    name: str
    context_limit: int  # tokens, prompt and output together
    vocab_size: int
    model_digest: bytes
    has_tokenizer: bool  # False: only token ids are accepted
    has_chat_template: bool
    created_s: int  # Unix seconds, when the router first saw it
    adapters: tuple[str, ...] = ()  # names that requests may give


@dataclass(frozen=True)
class Contract:
    """The part of a worker's contract that people compare; the router's pairs carry the full diff."""

    version: int
    digest: bytes
    model_digest: bytes
    tokenizer_digest: bytes
    layers: int
    vocab_size: int
    context_limit: int
    positions: str
    page_size: int
    page_axis_order: str
    device: str
    kv_dtype: str
    weight_dtype: str
    activation_dtype: str
    info: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerLoad:
    running: int
    waiting: int
    waiting_limit: int
    queued_tokens: int
    pages_total: int
    pages_held: int
    pages_cached: int
    tokens_per_s: float
    steps: int
    prefill_tokens_per_s: float = 0.0  # this and what follows: 0 is "not measured yet"
    shared_prefill_tokens_per_s: float = 0.0
    queued_prefill_tokens: int = 0
    predicted_wait_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    decode_step_ms: float = 0.0
    fixed_step_ms: float = 0.0
    prefill_token_us: float = 0.0
    prefill_pair_ns: float = 0.0
    step_ms: float = 0.0
    batch_limit: int = 0


@dataclass(frozen=True)
class Worker:
    worker_id: str
    role: str  # prefill | decode
    state: str  # starting | ready | draining
    model: str
    addresses: tuple[str, ...]
    contract: Contract
    load: WorkerLoad
    lease_left_s: float
    takes_prompts: bool = False  # a decode worker that computes prompts itself when asked to
    capabilities: tuple[str, ...] = ()  # options that it follows and an older version would ignore; ordered
    adapters: tuple[tuple[str, bytes], ...] = ()  # name and digest; no name: a replaced version
    metrics: str = ""  # host:port of its metrics page; empty: it has none


@dataclass(frozen=True)
class Placement:
    """Where prompts were computed since the router started, and how well their first tokens were foreseen."""

    disaggregate: str = ""  # always | never | auto
    handed_over: int = 0
    computed_at_decode: int = 0
    fallbacks: int = 0  # of these: no prefill worker was left
    cheaper: int = 0  # of these: it was predicted to be
    split: int = 0  # of those handed over: the decode worker computed the end of the prompt
    predictions: int = 0
    bounds: tuple[float, ...] = ()  # of the time to the first token over the predicted one
    ratios: tuple[int, ...] = ()  # first tokens within each; the last: above all of them


@dataclass(frozen=True)
class Pair:
    """Whether one prefill worker may hand to one decode worker, and every difference between them."""

    prefill_worker: str
    decode_worker: str
    fits: bool
    differences: tuple[FieldDifference, ...]


@dataclass(frozen=True)
class RecentRequest:
    """One of the last requests at a router."""

    request_id: str
    tenant: str
    model: str
    adapter: str  # empty: the base model
    label: str  # the caller's own name for it
    began_s: float  # Unix seconds by the router's clock
    age_ms: float  # since it was received, or until its end
    state: str  # running | done | cancelled | failed | refused
    record: HandoffRecord  # as far as it has come, without pairs and notes


@dataclass(frozen=True)
class Status:
    workers: tuple[Worker, ...]
    pairs: tuple[Pair, ...]
    registry: str
    registry_warning: str  # empty while the registry can be reached
    active_requests: int
    version: str
    placement: Placement = Placement()
    recent: tuple[RecentRequest, ...] = ()  # as many as were asked for, newest first
    reduced: bool = False  # this caller is no operator: see StatusResponse in the proto for what it is told


_LOAD_FIELDS = tuple(field.name for field in fields(WorkerLoad))


def models_from_proto(message: gateway_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            name=m.name,
            context_limit=m.context_limit,
            vocab_size=m.vocab_size,
            model_digest=m.model_digest,
            has_tokenizer=m.has_tokenizer,
            has_chat_template=m.has_chat_template,
            created_s=m.created_s,
            adapters=tuple(m.adapters),
        )
        for m in message.models
    )


def status_from_proto(message: gateway_pb2.StatusResponse) -> Status:
    return Status(
        workers=tuple(_worker(worker) for worker in message.workers),
        pairs=tuple(
            Pair(p.prefill_worker, p.decode_worker, p.fits, tuple(difference_from_proto(d) for d in p.differences))
            for p in message.pairs
        ),
        registry=message.registry,
        registry_warning=message.registry_warning,
        active_requests=message.active_requests,
        version=message.version,
        placement=_placement(message.placement),
        recent=tuple(_recent(one) for one in message.recent),
        reduced=message.reduced,
    )


def _recent(message: gateway_pb2.RecentRequest) -> RecentRequest:
    return RecentRequest(
        request_id=message.request_id,
        tenant=message.tenant,
        model=message.model,
        adapter=message.adapter,
        label=message.label,
        began_s=message.began_s,
        age_ms=message.age_ms,
        state=message.state,
        record=record_from_proto(message.record),
    )


def _placement(message: gateway_pb2.PlacementCounts) -> Placement:
    return Placement(
        disaggregate=message.disaggregate,
        handed_over=message.handed_over,
        computed_at_decode=message.computed_at_decode,
        split=message.split,
        fallbacks=message.fallbacks,
        cheaper=message.cheaper,
        predictions=message.predictions,
        bounds=tuple(message.bounds),
        ratios=tuple(message.ratios),
    )


def _worker(message: gateway_pb2.WorkerStatus) -> Worker:
    load = message.load
    return Worker(
        worker_id=message.worker_id,
        role=message.role,
        state=message.state,
        model=message.model,
        addresses=tuple(endpoint.address for endpoint in message.endpoints),
        contract=_contract(message.contract, message.contract_digest),
        load=WorkerLoad(**{name: getattr(load, name) for name in _LOAD_FIELDS}),
        lease_left_s=message.lease_left_s,
        takes_prompts=message.takes_prompts,
        capabilities=tuple(message.capabilities),
        adapters=tuple((adapter.name, adapter.digest) for adapter in message.adapters),
        metrics=message.metrics,
    )


def _contract(message: common_pb2.WorkerContract, digest: bytes) -> Contract:
    return Contract(
        version=message.version,
        digest=digest,
        model_digest=message.model_digest,
        tokenizer_digest=message.tokenizer_digest,
        layers=len(message.layers),
        vocab_size=message.vocab_size,
        context_limit=message.context_limit,
        positions=message.positions.kind,
        page_size=message.page_size,
        page_axis_order=message.page_axis_order,
        device=message.device,
        kv_dtype=message.kv_dtype,
        weight_dtype=message.weight_dtype,
        activation_dtype=message.activation_dtype,
        info=dict(message.info),
    )
