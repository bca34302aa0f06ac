"""Which caches fit which workers: the contract, the identity, and their diff.

Standard library only: the router imports this and must start without torch.

VERSION bumps when a reader of the old version could misread a cache of the new one: a
must-equal field added, removed or given another meaning; another canonical encoding;
another canonical payload order. It does not bump for a new informational field, nor for a
permission whose absence refuses, such as `allow_lossy`, nor for a must-equal field that only contracts have which need
it: whoever does not know it computes another contract digest, and refuses.

History:
    1  first version; later `allow_lossy` (absent: no); later `layer_positions` (absent: `positions` in every layer);
       later layers without planes, which an older reader refuses.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from cache_transfer.encoding import encode, sha256
from pdserve.errors import FieldDifference, Incompatible

VERSION = 1

MUST_EQUAL = "must_equal"
CONVERTIBLE = "convertible"
LOSSY = "lossy"
INFORMATIONAL = "informational"

# KV dtypes that a receiver casts, (sender's, its own). None into fp16, whose range ends at 65504:
# larger values would become infinite. A float64 model is paired with nothing but float64.
KV_CASTS = frozenset({("fp32", "bf16"), ("fp16", "bf16"), ("fp16", "fp32"), ("bf16", "fp32")})

_NAMED = 10  # differences that an error's text names; the error itself carries all


@dataclass(frozen=True)
class PositionScheme:
    """How token positions reach attention. Two caches with different schemes never mix."""

    kind: str  # rope | learned | alibi | none
    theta: float = 0.0
    dims: int = 0  # rotated dims of a head, or rows of a learned table
    scaling: str = "none"
    scaling_parameters: tuple[tuple[str, float], ...] = ()  # sorted by name
    original_max_positions: int = 0
    interleaved: bool = False
    keys_cached_rotated: bool = True

    def __post_init__(self) -> None:
        # 10000 in a configuration and 10000.0 from the wire are one number, hence one encoding.
        parameters = sorted((name, float(value)) for name, value in self.scaling_parameters)
        object.__setattr__(self, "theta", float(self.theta))
        object.__setattr__(self, "scaling_parameters", tuple(parameters))


@dataclass(frozen=True)
class AttentionScheme:
    scale: float
    soft_cap: float = 0.0
    sliding_window: tuple[int, ...] = ()  # per layer; 0: no window

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "soft_cap", float(self.soft_cap))


@dataclass(frozen=True)
class CachePlane:
    """One cached tensor of one layer: [tokens, heads, head_dim] in canonical order."""

    name: str  # "k" | "v" | "conv"
    heads: int
    head_dim: int


@dataclass(frozen=True)
class WorkerContract:
    """What a worker promises about every cache it makes or takes."""

    model_digest: bytes
    positions: PositionScheme
    attention: AttentionScheme
    planes: tuple[tuple[CachePlane, ...], ...]  # one entry per layer
    vocab_size: int
    tokenizer_digest: bytes  # b"": no tokenizer
    page_size: int
    page_axis_order: str  # hnd | nhd
    device: str
    kv_dtype: str
    weight_dtype: str
    activation_dtype: str
    allow_lossy: bool = False  # its operator lets it hand over or take with loss
    context_limit: int = 0
    layer_positions: tuple[PositionScheme, ...] = ()  # per layer, where layers differ; (): `positions` everywhere
    info: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    def digest(self) -> bytes:
        """SHA-256 over the must-equal fields: a fast key, never a substitute for `diff`."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return sha256("contract", tuple((name, value) for name, value, kind in _flatten(self) if kind == MUST_EQUAL))


@dataclass(frozen=True)
class HandoffIdentity:
    """Which cache a handoff is about; both sides compare it before a page is granted."""

    contract_digest: bytes
    adapter_digest: bytes | None
    tenant: str
    prompt_digest: bytes
    start: int
    end: int

    def digest(self) -> bytes:
        return sha256("identity", self)


@dataclass(frozen=True)
class Endpoint:
    address: str
    transport: str = "grpc"
    authority: str = ""
    first_layer: int = 0
    end_layer: int = 0  # 0: all
    first_head: int = 0
    end_head: int = 0  # 0: all


@dataclass(frozen=True)
class Ticket:
    """Permission to hand one cache to one decode worker, once."""

    handoff_id: bytes
    attempt: int
    incarnation: bytes
    secret: bytes = field(repr=False)
    ttl_ms: int
    held_tokens: int
    endpoints: tuple[Endpoint, ...]


def prompt_digest(ids: tuple[int, ...]) -> bytes:
    return sha256("prompt", struct.pack(f"<{len(ids)}i", *ids))


def cache_identity(
    contract: WorkerContract, adapter: bytes | None, tenant: str, maker: WorkerContract | None = None
) -> bytes:
    """Under which name a worker may find full pages again. Spelled out, not hashed: the index compares all of it.

    Args:
        contract: the worker's own.
        maker: of a compatible worker that computed the prompt, if another did. Its arithmetic counts: pages
            that came with loss must not serve a request whose own prefill worker brings them without, nor
            those of fast kernels one that is promised the bits of deterministic mode.
    """
    return encode(("cache", contract.digest(), arithmetic(maker or contract), adapter, tenant))


def numerics(contract: WorkerContract) -> tuple[tuple[str, str], ...]:
    """(code, value) of the fields in which two caches may differ with loss."""
    c = contract
    return ("KV_DTYPE", c.kv_dtype), ("WEIGHT_DTYPE", c.weight_dtype), ("ACTIVATION_DTYPE", c.activation_dtype)


def arithmetic(contract: WorkerContract) -> tuple[tuple[str, str], ...]:
    """(code, value) of what decides the bits of a cache besides the must-equal fields and the device."""
    return *numerics(contract), ("INFO.deterministic", contract.info.get("deterministic", "false"))


def diff(left: WorkerContract, right: WorkerContract) -> tuple[FieldDifference, ...]:
    """Every field in which two contracts differ, must-equal ones first.

    `left` is the sender's (prefill's). Codes name the layer: PLANES[3].k.heads.
    """
    order = (MUST_EQUAL, LOSSY, CONVERTIBLE, INFORMATIONAL)
    planes = left.planes != right.planes  # most of the rows, and nearly always equal
    a = {name: (value, kind) for name, value, kind in _flatten(left, planes)}
    b = {name: (value, kind) for name, value, kind in _flatten(right, planes)}
    found = []
    for name in {**a, **b}:
        x, kind = a.get(name, (None, MUST_EQUAL))
        y, other = b.get(name, (None, kind))
        if encode(x) != encode(y):
            found.append(FieldDifference(name, _show(x), _show(y), kind if name in a else other))
    return tuple(sorted(found, key=lambda d: order.index(d.kind)))


def refusals(differences: tuple[FieldDifference, ...], allow_lossy: bool = False) -> tuple[FieldDifference, ...]:
    """The differences that forbid a handoff; `allow_lossy` when all who have a say agreed (see `both_allow_lossy`)."""
    return tuple(d for d in differences if d.kind == MUST_EQUAL or (d.kind == LOSSY and not (allow_lossy and _fits(d))))


def both_allow_lossy(left: WorkerContract, right: WorkerContract) -> bool:
    """A handoff with loss needs the consent of both workers (and the router's, see its settings)."""
    return left.allow_lossy and right.allow_lossy


def check_compatible(
    left: WorkerContract, right: WorkerContract, allow_lossy: bool = True
) -> tuple[FieldDifference, ...]:
    """Returns the differences that will be converted; raises Incompatible with the rest.

    Args:
        allow_lossy: False forbids loss even if both workers allow it.
    """
    differences = diff(left, right)
    refused = refusals(differences, allow_lossy and both_allow_lossy(left, right))
    if refused:
        raise Incompatible(
            f"the contracts differ in {_named(refused)}",
            field=refused[0].code,
            remedy=remedy_for(refused),
            differences=refused,
        )
    return tuple(d for d in differences if d.kind != INFORMATIONAL)


def remedy_for(refused: tuple[FieldDifference, ...]) -> str:
    """What an operator can do about differences that refuse."""
    if refused and not refusals(refused, allow_lossy=True):
        return "pair workers of one precision, or set allow_lossy on both workers and the router"
    return "pair workers of one model, tokenizer and precision"


def check_identity(expected: HandoffIdentity, got: HandoffIdentity) -> None:
    """Raises Incompatible naming the first field in which two identities differ."""
    found = tuple(
        FieldDifference(f"IDENTITY.{f.name}", _show(getattr(got, f.name)), _show(getattr(expected, f.name)))
        for f in fields(HandoffIdentity)
        if encode(getattr(got, f.name)) != encode(getattr(expected, f.name))
    )
    if found:
        told = f"the cache is not the one expected: {found[0]}"
        remedy = "send the cache that the ticket was given for, under the identity that came with it"
        raise Incompatible(told, reason="IDENTITY_MISMATCH", field=found[0].code, remedy=remedy, differences=found)


def _flatten(contract: WorkerContract, planes: bool = True) -> list[tuple[str, object, str]]:
    """(stable name, value, class) of every comparable field; without those of the layers' planes unless `planes`."""
    c = contract
    rows: list[tuple[str, object, str]] = [
        ("CONTRACT_VERSION", c.version, MUST_EQUAL),
        ("MODEL_DIGEST", c.model_digest, MUST_EQUAL),
    ]
    rows += [(f"POSITION_SCHEME.{f.name}", getattr(c.positions, f.name), MUST_EQUAL) for f in fields(PositionScheme)]
    rows += [(f"LAYER_POSITIONS[{i}]", _values(scheme), MUST_EQUAL) for i, scheme in enumerate(c.layer_positions)]
    rows += [(f"ATTENTION.{f.name}", getattr(c.attention, f.name), MUST_EQUAL) for f in fields(AttentionScheme)]
    rows.append(("LAYERS", len(c.planes), MUST_EQUAL))
    for layer, found in enumerate(c.planes if planes else ()):
        rows.append((f"PLANES[{layer}]", tuple(p.name for p in found), MUST_EQUAL))
        for plane in found:
            rows.append((f"PLANES[{layer}].{plane.name}.heads", plane.heads, MUST_EQUAL))
            rows.append((f"PLANES[{layer}].{plane.name}.head_dim", plane.head_dim, MUST_EQUAL))
    rows += [
        ("VOCAB_SIZE", c.vocab_size, MUST_EQUAL),
        ("TOKENIZER_DIGEST", c.tokenizer_digest, MUST_EQUAL),
        ("PAGE_SIZE", c.page_size, CONVERTIBLE),
        ("PAGE_AXIS_ORDER", c.page_axis_order, CONVERTIBLE),
        ("DEVICE", c.device, CONVERTIBLE),
        *((name, value, LOSSY) for name, value in numerics(c)),
        ("ALLOW_LOSSY", c.allow_lossy, INFORMATIONAL),
        ("CONTEXT_LIMIT", c.context_limit, INFORMATIONAL),
    ]
    rows += [(f"INFO.{name}", c.info[name], INFORMATIONAL) for name in sorted(c.info)]
    return rows


def _values(scheme: PositionScheme) -> tuple[object, ...]:
    return tuple(getattr(scheme, f.name) for f in fields(scheme))


def _named(differences: tuple[FieldDifference, ...]) -> str:
    names = [difference.code for difference in differences]
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _fits(difference: FieldDifference) -> bool:
    """Whether a lossy difference can be converted, or lived with, at all."""
    values = (difference.left, difference.right)
    return values in KV_CASTS if difference.code == "KV_DTYPE" else "float64" not in values


def _show(value: object) -> str:
    if value is None:
        return "absent"
    if isinstance(value, bytes):
        return value.hex()[:16] if value else "empty"
    return str(value)
