"""Contract types survive protobuf; what is missing or oversized is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cache_transfer import wire
from cache_transfer.contract import (
    AttentionScheme,
    Endpoint,
    HandoffIdentity,
    PositionScheme,
    Ticket,
    WorkerContract,
    diff,
)
from pdserve.errors import FieldDifference, InvalidRequest
from pdserve.v1 import common_pb2 as pb
from tests.cache_transfer.support import make_contract, make_identity

FULL = replace(
    make_contract(layers=2),
    positions=PositionScheme("rope", 5e5, 4, "llama3", (("factor", 8.0), ("low", 0.1)), 8192, True, False),
    attention=AttentionScheme(0.25, 30.0, (0, 128)),
    layer_positions=(PositionScheme("rope", 1e4, 4), PositionScheme("none")),
    tokenizer_digest=b"t" * 32,
    allow_lossy=True,
    context_limit=4096,
    info={"torch": "2", "kernel": ""},
)
TICKET = Ticket(b"h" * 16, 3, b"i" * 16, b"s" * 32, 500, 7, (Endpoint("a:1", "grpc", "name", 0, 2, 1, 3),))


@pytest.mark.parametrize("contract", [FULL, make_contract()])
def test_contracts_survive(contract: WorkerContract) -> None:
    read = wire.contract_from_proto(wire.contract_to_proto(contract))
    assert read == contract
    assert diff(read, contract) == ()
    assert read.digest() == contract.digest()


def test_whole_numbers_are_floats_on_both_sides_of_the_wire() -> None:
    """A configuration may say 10000 where the wire says 10000.0."""
    positions = PositionScheme("rope", 10000, 4, "yarn", (("b", 1), ("a", 2)))
    contract = replace(FULL, positions=positions, attention=AttentionScheme(1, 30))
    read = wire.contract_from_proto(wire.contract_to_proto(contract))
    assert diff(read, contract) == ()
    assert read.digest() == contract.digest()


@pytest.mark.parametrize("adapter", [None, b"a" * 32])
def test_identities_survive(adapter: bytes | None) -> None:
    identity = replace(make_identity(FULL, 9, 4), adapter_digest=adapter)
    assert wire.identity_from_proto(wire.identity_to_proto(identity)) == identity


def test_tickets_and_endpoints_survive() -> None:
    assert wire.ticket_from_proto(wire.ticket_to_proto(TICKET)) == TICKET
    endpoint = Endpoint("b:2")
    assert wire.endpoint_from_proto(wire.endpoint_to_proto(endpoint)) == endpoint


@pytest.mark.parametrize("kind", ["must_equal", "convertible", "lossy", "informational"])
def test_differences_survive(kind: str) -> None:
    difference = FieldDifference("POSITION_SCHEME.theta", "1", "2", kind)
    assert wire.difference_from_proto(wire.difference_to_proto(difference)) == difference


def test_an_unknown_class_of_difference_is_the_strictest() -> None:
    assert wire.difference_from_proto(pb.Difference(code="X")).kind == "must_equal"


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read()
    assert caught.value.reason.startswith("MALFORMED_")
    return caught.value.field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("contract.positions", lambda p: p.ClearField("positions")),
        ("contract.attention", lambda p: p.ClearField("attention")),
        ("contract.layers", lambda p: p.ClearField("layers")),
        ("contract.model_digest", lambda p: p.ClearField("model_digest")),
        ("contract.tokenizer_digest", lambda p: setattr(p, "tokenizer_digest", b"short")),
        ("contract.version", lambda p: setattr(p, "version", 0)),
        ("contract.vocab_size", lambda p: setattr(p, "vocab_size", 0)),
        ("contract.page_size", lambda p: setattr(p, "page_size", 0)),
        ("contract.page_axis_order", lambda p: setattr(p, "page_axis_order", "dhn")),
        ("contract.kv_dtype", lambda p: setattr(p, "kv_dtype", "int4")),
        ("contract.device", lambda p: setattr(p, "device", "")),
        ("contract.weight_dtype", lambda p: setattr(p, "weight_dtype", "x" * 300)),
        ("contract.positions.kind", lambda p: setattr(p.positions, "kind", "magic")),
        ("contract.positions.theta", lambda p: setattr(p.positions, "theta", float("nan"))),
        ("contract.positions.scaling_parameters.f", lambda p: p.positions.scaling_parameters.update(f=float("inf"))),
        ("contract.layer_positions", lambda p: p.layer_positions.append(p.positions)),
        ("contract.positions.kind", lambda p: setattr(p.layer_positions[1], "kind", "magic")),
        ("contract.attention.scale", lambda p: setattr(p.attention, "scale", float("inf"))),
        ("contract.attention.sliding_window", lambda p: p.attention.sliding_window.append(1)),
        ("contract.layers", lambda p: p.layers.extend([p.layers[0]] * 5000)),
        ("contract.layers.planes", lambda p: [layer.ClearField("planes") for layer in p.layers]),
        ("contract.layers[0].planes", lambda p: setattr(p.layers[0].planes[1], "name", "k")),
        ("contract.layers[0].k.heads", lambda p: setattr(p.layers[0].planes[0], "heads", 0)),
        ("contract.layers[0].k.heads", lambda p: setattr(p.layers[0].planes[0], "heads", 2**31)),
        ("contract.layers[0].v.head_dim", lambda p: setattr(p.layers[0].planes[1], "head_dim", 2**31)),
        ("contract.info", lambda p: p.info.update({str(i): "" for i in range(300)})),
        ("contract.info.x", lambda p: p.info.update(x="y" * 5000)),
    ],
)
def test_a_bad_contract_is_refused_by_field(field: str, change: Callable[[pb.WorkerContract], None]) -> None:
    proto = wire.contract_to_proto(FULL)
    change(proto)
    assert refused(lambda: wire.contract_from_proto(proto)) == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("contract_digest", {"contract_digest": b""}),
        ("adapter_digest", {"adapter_digest": b""}),
        ("prompt_digest", {"prompt_digest": b"x" * 31}),
        ("tenant", {"tenant": "x" * 300}),
        ("end", {"start": 5, "end": 4}),
        ("end", {"start": 0, "end": 0}),
    ],
)
def test_a_bad_identity_is_refused_by_field(field: str, changes: dict[str, object]) -> None:
    identity: HandoffIdentity = replace(make_identity(FULL, 9), **changes)  # type: ignore[arg-type]
    proto = wire.identity_to_proto(identity)
    assert refused(lambda: wire.identity_from_proto(proto)) == f"identity.{field}"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("ticket.handoff_id", {"handoff_id": b"short"}),
        ("ticket.attempt", {"attempt": 0}),
        ("ticket.incarnation", {"incarnation": b""}),
        ("ticket.secret", {"secret": b"s" * 16}),
        ("ticket.ttl_ms", {"ttl_ms": 0}),
        ("ticket.endpoints", {"endpoints": ()}),
        ("endpoint.address", {"endpoints": (Endpoint(""),)}),
        ("endpoint.transport", {"endpoints": (Endpoint("a:1", transport=""),)}),
        ("endpoint.end_layer", {"endpoints": (Endpoint("a:1", first_layer=3, end_layer=3),)}),
        ("endpoint.end_head", {"endpoints": (Endpoint("a:1", first_head=3, end_head=2),)}),
    ],
)
def test_a_bad_ticket_is_refused_by_field(field: str, changes: dict[str, object]) -> None:
    proto = wire.ticket_to_proto(replace(TICKET, **changes))  # type: ignore[arg-type]
    assert refused(lambda: wire.ticket_from_proto(proto)) == field
