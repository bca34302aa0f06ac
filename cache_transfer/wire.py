"""The one place where contract types and protobuf meet.

`*_to_proto` never fails. `*_from_proto` trusts nothing: a missing message, a digest of the
wrong length, a name that is not known or a list longer than its limit raises InvalidRequest
with reason MALFORMED_CONTRACT, MALFORMED_IDENTITY, MALFORMED_TICKET or MALFORMED_ENDPOINT and
the field's name. Unknown protobuf fields are ignored: a field that changes what a cache means
bumps the contract version, and versions are compared.
"""

from __future__ import annotations

from functools import lru_cache

from cache_transfer.contract import (
    CONVERTIBLE,
    INFORMATIONAL,
    LOSSY,
    MUST_EQUAL,
    AttentionScheme,
    CachePlane,
    Endpoint,
    HandoffIdentity,
    PositionScheme,
    Ticket,
    WorkerContract,
)
from cache_transfer.fields import FieldReader
from pdserve.errors import FieldDifference
from pdserve.v1 import common_pb2 as pb

ID_BYTES = 16
MAX_LAYERS = 4096
MAX_PLANES = 16  # of one layer
MAX_PLANES_IN_ALL = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 20
MAX_ENTRIES = 256  # items of a map or of the endpoints
MAX_INFO_TEXT = 4096  # characters of one informational value

POSITION_KINDS = ("rope", "learned", "alibi", "none")
AXIS_ORDERS = ("hnd", "nhd")
DTYPES = ("fp32", "fp16", "bf16", "float64")

_CLASSES = {
    MUST_EQUAL: pb.DIFFERENCE_CLASS_MUST_EQUAL,
    CONVERTIBLE: pb.DIFFERENCE_CLASS_CONVERTIBLE,
    LOSSY: pb.DIFFERENCE_CLASS_LOSSY,
    INFORMATIONAL: pb.DIFFERENCE_CLASS_INFORMATIONAL,
}
_CLASS_NAMES = {number: name for name, number in _CLASSES.items()}


def contract_to_proto(contract: WorkerContract) -> pb.WorkerContract:
    c = contract
    return pb.WorkerContract(
        version=c.version,
        model_digest=c.model_digest,
        positions=_positions_to_proto(c.positions),
        layer_positions=[_positions_to_proto(scheme) for scheme in c.layer_positions],
        attention=pb.AttentionScheme(
            scale=c.attention.scale, soft_cap=c.attention.soft_cap, sliding_window=c.attention.sliding_window
        ),
        layers=[
            pb.LayerPlanes(planes=[pb.CachePlane(name=p.name, heads=p.heads, head_dim=p.head_dim) for p in planes])
            for planes in c.planes
        ],
        vocab_size=c.vocab_size,
        tokenizer_digest=c.tokenizer_digest,
        page_size=c.page_size,
        page_axis_order=c.page_axis_order,
        device=c.device,
        kv_dtype=c.kv_dtype,
        weight_dtype=c.weight_dtype,
        activation_dtype=c.activation_dtype,
        allow_lossy=c.allow_lossy,
        context_limit=c.context_limit,
        info=dict(c.info),
    )


def contract_from_proto(proto: pb.WorkerContract) -> WorkerContract:
    read = FieldReader("contract", "MALFORMED_CONTRACT")
    if not proto.HasField("positions"):
        read.fail("positions", "is missing")
    if not proto.HasField("attention"):
        read.fail("attention", "is missing")
    read.count("layers", len(proto.layers), 1, MAX_LAYERS)
    read.count("layers.planes", sum(len(layer.planes) for layer in proto.layers), 1, MAX_PLANES_IN_ALL)
    read.count("info", len(proto.info), 0, MAX_ENTRIES)
    if len(proto.layer_positions) not in (0, len(proto.layers)):
        read.fail("layer_positions", f"has {len(proto.layer_positions)} entries for {len(proto.layers)} layers")
    if proto.tokenizer_digest:
        read.digest("tokenizer_digest", proto.tokenizer_digest)
    return WorkerContract(
        version=read.number("version", proto.version, 1),
        model_digest=read.digest("model_digest", proto.model_digest),
        positions=_positions_from_proto(read, proto.positions),
        layer_positions=tuple(_positions_from_proto(read, scheme) for scheme in proto.layer_positions),
        attention=_attention_from_proto(read, proto.attention, len(proto.layers)),
        planes=tuple(_planes_from_proto(read, layer, planes) for layer, planes in enumerate(proto.layers)),
        vocab_size=read.number("vocab_size", proto.vocab_size, 1),
        tokenizer_digest=proto.tokenizer_digest,
        page_size=read.number("page_size", proto.page_size, 1),
        page_axis_order=read.one_of("page_axis_order", proto.page_axis_order, AXIS_ORDERS),
        device=read.text("device", proto.device),
        kv_dtype=read.one_of("kv_dtype", proto.kv_dtype, DTYPES),
        weight_dtype=read.text("weight_dtype", proto.weight_dtype),
        activation_dtype=read.text("activation_dtype", proto.activation_dtype),
        allow_lossy=proto.allow_lossy,
        context_limit=proto.context_limit,
        info={
            read.text("info", name): read.text(f"info.{name}", value, low=0, high=MAX_INFO_TEXT)
            for name, value in sorted(proto.info.items())
        },
    )


def known_contract(proto: pb.WorkerContract) -> WorkerContract:
    """As `contract_from_proto`, for small ones; remembers the last few, as a peer sends the same one each time."""
    return _known_contract(proto.SerializeToString(deterministic=True))


@lru_cache(maxsize=8)
def _known_contract(data: bytes) -> WorkerContract:
    return contract_from_proto(pb.WorkerContract.FromString(data))


def identity_to_proto(identity: HandoffIdentity) -> pb.HandoffIdentity:
    return pb.HandoffIdentity(
        contract_digest=identity.contract_digest,
        adapter_digest=identity.adapter_digest,
        tenant=identity.tenant,
        prompt_digest=identity.prompt_digest,
        start=identity.start,
        end=identity.end,
    )


def identity_from_proto(proto: pb.HandoffIdentity) -> HandoffIdentity:
    read = FieldReader("identity", "MALFORMED_IDENTITY")
    adapter = proto.adapter_digest if proto.HasField("adapter_digest") else None
    if adapter is not None:
        read.digest("adapter_digest", adapter)
    if not proto.start <= proto.end or proto.end == 0:
        read.fail("end", f"[{proto.start}, {proto.end}) is not the range of a prompt")
    return HandoffIdentity(
        contract_digest=read.digest("contract_digest", proto.contract_digest),
        adapter_digest=adapter,
        tenant=read.text("tenant", proto.tenant, low=0),
        prompt_digest=read.digest("prompt_digest", proto.prompt_digest),
        start=proto.start,
        end=proto.end,
    )


def endpoint_to_proto(endpoint: Endpoint) -> pb.Endpoint:
    return pb.Endpoint(
        transport=endpoint.transport,
        address=endpoint.address,
        authority=endpoint.authority,
        first_layer=endpoint.first_layer,
        end_layer=endpoint.end_layer,
        first_head=endpoint.first_head,
        end_head=endpoint.end_head,
    )


def endpoint_from_proto(proto: pb.Endpoint) -> Endpoint:
    read = FieldReader("endpoint", "MALFORMED_ENDPOINT")
    for name, first, end in (
        ("end_layer", proto.first_layer, proto.end_layer),
        ("end_head", proto.first_head, proto.end_head),
    ):
        if end and first >= end:
            read.fail(name, f"[{first}, {end}) is empty")
    return Endpoint(
        address=read.text("address", proto.address),
        transport=read.text("transport", proto.transport),
        authority=read.text("authority", proto.authority, low=0),
        first_layer=proto.first_layer,
        end_layer=proto.end_layer,
        first_head=proto.first_head,
        end_head=proto.end_head,
    )


def ticket_to_proto(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        handoff_id=ticket.handoff_id,
        attempt=ticket.attempt,
        incarnation=ticket.incarnation,
        secret=ticket.secret,
        ttl_ms=ticket.ttl_ms,
        held_tokens=ticket.held_tokens,
        endpoints=[endpoint_to_proto(endpoint) for endpoint in ticket.endpoints],
    )


def ticket_from_proto(proto: pb.Ticket) -> Ticket:
    read = FieldReader("ticket", "MALFORMED_TICKET")
    read.count("endpoints", len(proto.endpoints), 1, MAX_ENTRIES)
    return Ticket(
        handoff_id=read.digest("handoff_id", proto.handoff_id, ID_BYTES),
        attempt=read.number("attempt", proto.attempt, 1),
        incarnation=read.digest("incarnation", proto.incarnation, ID_BYTES),
        secret=read.digest("secret", proto.secret),
        ttl_ms=read.number("ttl_ms", proto.ttl_ms, 1),
        held_tokens=proto.held_tokens,
        endpoints=tuple(endpoint_from_proto(endpoint) for endpoint in proto.endpoints),
    )


def difference_to_proto(difference: FieldDifference) -> pb.Difference:
    number = _CLASSES.get(difference.kind, pb.DIFFERENCE_CLASS_UNSPECIFIED)
    proto = pb.Difference(code=difference.code, left=difference.left, right=difference.right)
    setattr(proto, "class", number)  # a Python keyword
    return proto


def difference_from_proto(proto: pb.Difference) -> FieldDifference:
    """An unknown class is read as must_equal: the strictest."""
    kind = _CLASS_NAMES.get(getattr(proto, "class"), MUST_EQUAL)
    return FieldDifference(proto.code, proto.left, proto.right, kind)


def _positions_to_proto(scheme: PositionScheme) -> pb.PositionScheme:
    return pb.PositionScheme(
        kind=scheme.kind,
        theta=scheme.theta,
        dims=scheme.dims,
        scaling=scheme.scaling,
        scaling_parameters=dict(scheme.scaling_parameters),
        original_max_positions=scheme.original_max_positions,
        interleaved=scheme.interleaved,
        keys_cached_rotated=scheme.keys_cached_rotated,
    )


def _positions_from_proto(read: FieldReader, proto: pb.PositionScheme) -> PositionScheme:
    read.count("positions.scaling_parameters", len(proto.scaling_parameters), 0, MAX_ENTRIES)
    return PositionScheme(
        kind=read.one_of("positions.kind", proto.kind, POSITION_KINDS),
        theta=read.finite("positions.theta", proto.theta),
        dims=proto.dims,
        scaling=read.text("positions.scaling", proto.scaling),
        scaling_parameters=tuple(
            (
                read.text("positions.scaling_parameters", name),
                read.finite(f"positions.scaling_parameters.{name}", value),
            )
            for name, value in sorted(proto.scaling_parameters.items())
        ),
        original_max_positions=proto.original_max_positions,
        interleaved=proto.interleaved,
        keys_cached_rotated=proto.keys_cached_rotated,
    )


def _attention_from_proto(read: FieldReader, proto: pb.AttentionScheme, layers: int) -> AttentionScheme:
    if len(proto.sliding_window) not in (0, layers):
        read.fail("attention.sliding_window", f"has {len(proto.sliding_window)} entries for {layers} layers")
    return AttentionScheme(
        scale=read.finite("attention.scale", proto.scale),
        soft_cap=read.finite("attention.soft_cap", proto.soft_cap),
        sliding_window=tuple(proto.sliding_window),
    )


def _planes_from_proto(read: FieldReader, layer: int, proto: pb.LayerPlanes) -> tuple[CachePlane, ...]:
    where = f"layers[{layer}]"
    read.count(f"{where}.planes", len(proto.planes), 0, MAX_PLANES)  # 0: the layer caches nothing
    planes = tuple(
        CachePlane(
            name=read.text(f"{where}.name", plane.name),
            heads=read.number(f"{where}.{plane.name}.heads", plane.heads, 1, MAX_HEADS),
            head_dim=read.number(f"{where}.{plane.name}.head_dim", plane.head_dim, 1, MAX_HEAD_DIM),
        )
        for plane in proto.planes
    )
    if len({plane.name for plane in planes}) != len(planes):
        read.fail(f"{where}.planes", "names a plane twice")
    return planes
