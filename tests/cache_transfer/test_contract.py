"""Contracts: the encoding has no collisions, every field counts, differences are named."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_transfer.contract import (
    AttentionScheme,
    CachePlane,
    PositionScheme,
    WorkerContract,
    cache_identity,
    check_compatible,
    check_identity,
    diff,
    prompt_digest,
    refusals,
)
from cache_transfer.encoding import encode
from pdserve.errors import Incompatible
from tests.cache_transfer.support import make_contract, make_identity

BASE = make_contract(layers=2)
POSITIONS = BASE.positions
ATTENTION = BASE.attention

CHANGES: list[tuple[str, str, WorkerContract]] = [
    ("CONTRACT_VERSION", "must_equal", replace(BASE, version=2)),
    ("MODEL_DIGEST", "must_equal", replace(BASE, model_digest=b"n" * 32)),
    ("POSITION_SCHEME.kind", "must_equal", replace(BASE, positions=replace(POSITIONS, kind="alibi"))),
    ("POSITION_SCHEME.theta", "must_equal", replace(BASE, positions=replace(POSITIONS, theta=1.0))),
    ("POSITION_SCHEME.dims", "must_equal", replace(BASE, positions=replace(POSITIONS, dims=2))),
    ("POSITION_SCHEME.scaling", "must_equal", replace(BASE, positions=replace(POSITIONS, scaling="llama3"))),
    (
        "POSITION_SCHEME.scaling_parameters",
        "must_equal",
        replace(BASE, positions=replace(POSITIONS, scaling_parameters=(("factor", 2.0),))),
    ),
    (
        "POSITION_SCHEME.original_max_positions",
        "must_equal",
        replace(BASE, positions=replace(POSITIONS, original_max_positions=1)),
    ),
    ("POSITION_SCHEME.interleaved", "must_equal", replace(BASE, positions=replace(POSITIONS, interleaved=True))),
    (
        "POSITION_SCHEME.keys_cached_rotated",
        "must_equal",
        replace(BASE, positions=replace(POSITIONS, keys_cached_rotated=False)),
    ),
    ("ATTENTION.scale", "must_equal", replace(BASE, attention=replace(ATTENTION, scale=2.0))),
    ("ATTENTION.soft_cap", "must_equal", replace(BASE, attention=replace(ATTENTION, soft_cap=2.0))),
    ("ATTENTION.sliding_window", "must_equal", replace(BASE, attention=replace(ATTENTION, sliding_window=(0, 8)))),
    (
        "PLANES[1].k.heads",
        "must_equal",
        replace(BASE, planes=(BASE.planes[0], (CachePlane("k", 1, 4), BASE.planes[1][1]))),
    ),
    (
        "PLANES[0].v.head_dim",
        "must_equal",
        replace(BASE, planes=((BASE.planes[0][0], CachePlane("v", 3, 8)), BASE.planes[1])),
    ),
    ("PLANES[0]", "must_equal", replace(BASE, planes=(BASE.planes[0][::-1], BASE.planes[1]))),
    ("VOCAB_SIZE", "must_equal", replace(BASE, vocab_size=12)),
    ("TOKENIZER_DIGEST", "must_equal", replace(BASE, tokenizer_digest=b"t" * 32)),
    ("PAGE_SIZE", "convertible", replace(BASE, page_size=5)),
    ("PAGE_AXIS_ORDER", "convertible", replace(BASE, page_axis_order="nhd")),
    ("DEVICE", "convertible", replace(BASE, device="cuda")),
    ("KV_DTYPE", "lossy", replace(BASE, kv_dtype="bf16")),
    ("WEIGHT_DTYPE", "lossy", replace(BASE, weight_dtype="fp16")),
    ("ACTIVATION_DTYPE", "lossy", replace(BASE, activation_dtype="fp16")),
    ("ALLOW_LOSSY", "informational", replace(BASE, allow_lossy=True)),
    ("CONTEXT_LIMIT", "informational", replace(BASE, context_limit=1)),
    ("INFO.torch", "informational", replace(BASE, info={"torch": "3"})),
]


@pytest.mark.parametrize(("code", "kind", "changed"), CHANGES, ids=[code for code, _, _ in CHANGES])
def test_each_field_alone_is_named(code: str, kind: str, changed: WorkerContract) -> None:
    found = diff(BASE, changed)
    assert [(d.code, d.kind) for d in found] == [(code, kind)]
    assert found[0].left != found[0].right
    assert (changed.digest() != BASE.digest()) == (kind == "must_equal")
    if kind in ("must_equal", "lossy"):
        with pytest.raises(Incompatible) as caught:
            check_compatible(BASE, changed)
        assert caught.value.differences == found
        assert code in str(caught.value)
    else:
        assert check_compatible(BASE, changed) == (found if kind == "convertible" else ())
    assert (refusals(found, allow_lossy=True) == found) == (kind == "must_equal")


@pytest.mark.parametrize("sends", ["fp32", "bf16", "fp16", "float64"])
@pytest.mark.parametrize("takes", ["fp32", "bf16", "fp16", "float64"])
def test_only_these_precisions_are_converted_when_both_sides_agree(sends: str, takes: str) -> None:
    """Nothing narrows into fp16, where values above 65504 would become infinite; float64 stays alone."""
    left = replace(BASE, kv_dtype=sends, allow_lossy=True)
    right = replace(BASE, kv_dtype=takes, allow_lossy=True)
    if sends == takes:
        assert check_compatible(left, right) == ()
    elif takes in ("bf16", "fp32") and sends != "float64":
        (found,) = check_compatible(left, right)
        assert (found.code, found.left, found.right, found.kind) == ("KV_DTYPE", sends, takes, "lossy")
    else:
        with pytest.raises(Incompatible) as caught:
            check_compatible(left, right)
        assert caught.value.field == "KV_DTYPE" and "allow_lossy" not in caught.value.remedy


@pytest.mark.parametrize("field", ["weight_dtype", "activation_dtype"])
def test_other_numerics_may_differ_where_both_agree_but_not_from_float64(field: str) -> None:
    left, right = replace(BASE, allow_lossy=True), replace(BASE, allow_lossy=True, **{field: "bf16"})  # type: ignore[arg-type]
    assert [d.code for d in check_compatible(left, right)] == [field.upper()]
    with pytest.raises(Incompatible) as caught:
        check_compatible(left, replace(right, **{field: "float64"}))  # type: ignore[arg-type]
    assert caught.value.field == field.upper()


@pytest.mark.parametrize(
    ("sender", "receiver", "third"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_loss_needs_the_consent_of_all(sender: bool, receiver: bool, third: bool) -> None:
    left, right = replace(BASE, allow_lossy=sender), replace(BASE, kv_dtype="bf16", allow_lossy=receiver)
    with pytest.raises(Incompatible) as caught:
        check_compatible(left, right, allow_lossy=third)
    assert caught.value.field == "KV_DTYPE" and "allow_lossy" in caught.value.remedy


def test_pages_of_other_numerics_have_another_name_in_the_index() -> None:
    other = replace(BASE, kv_dtype="bf16", allow_lossy=True)
    assert cache_identity(BASE, None, "t") == cache_identity(BASE, None, "t", replace(BASE, page_size=9, device="cuda"))
    assert cache_identity(BASE, None, "t") != cache_identity(BASE, None, "t", other)
    assert other.digest() == BASE.digest()  # a permission and a precision change nothing that must be equal


def test_every_field_of_a_contract_is_compared() -> None:
    """A field added to a dataclass must be added to the list above, and so to the diff."""
    covered = {code.split("[")[0].split(".")[0] for code, _, _ in CHANGES} | {"LAYER_POSITIONS"}  # the test below
    fields = set(WorkerContract.__dataclass_fields__) - {"positions", "attention", "planes", "version", "info"}
    assert {name.upper() for name in fields} <= covered
    for prefix, record in (("POSITION_SCHEME", PositionScheme), ("ATTENTION", AttentionScheme)):
        codes = {code for code, _, _ in CHANGES}
        assert {f"{prefix}.{name}" for name in record.__dataclass_fields__} <= codes


def test_positions_of_single_layers_are_compared_and_named() -> None:
    none = PositionScheme("none")
    own, other = (replace(BASE, layer_positions=(POSITIONS, last)) for last in (POSITIONS, none))
    assert [(d.code, d.kind) for d in diff(own, other)] == [("LAYER_POSITIONS[1]", "must_equal")]
    assert [d.code for d in diff(BASE, other)] == ["LAYER_POSITIONS[0]", "LAYER_POSITIONS[1]"]
    assert len({BASE.digest(), own.digest(), other.digest()}) == 3


def test_missing_layers_are_named() -> None:
    codes = [d.code for d in diff(BASE, replace(BASE, planes=BASE.planes[:1]))]
    assert codes[0] == "LAYERS"
    assert "PLANES[1].v.head_dim" in codes


def test_the_contract_digest_is_as_documented() -> None:
    rows: list[tuple[str, object]] = [("CONTRACT_VERSION", 1), ("MODEL_DIGEST", b"m" * 32)]
    rows += [("POSITION_SCHEME.kind", "rope"), ("POSITION_SCHEME.theta", 10000.0), ("POSITION_SCHEME.dims", 4)]
    rows += [("POSITION_SCHEME.scaling", "none"), ("POSITION_SCHEME.scaling_parameters", ())]
    rows += [("POSITION_SCHEME.original_max_positions", 0), ("POSITION_SCHEME.interleaved", False)]
    rows += [("POSITION_SCHEME.keys_cached_rotated", True)]
    rows += [("ATTENTION.scale", 0.5), ("ATTENTION.soft_cap", 0.0), ("ATTENTION.sliding_window", ()), ("LAYERS", 2)]
    for layer in range(2):
        rows += [(f"PLANES[{layer}]", ("k", "v"))]
        for plane in "kv":
            rows += [(f"PLANES[{layer}].{plane}.heads", 3), (f"PLANES[{layer}].{plane}.head_dim", 4)]
    rows += [("VOCAB_SIZE", 11), ("TOKENIZER_DIGEST", b"")]
    assert BASE.digest() == hashlib.sha256(encode(("contract", tuple(rows)))).digest()


@pytest.mark.parametrize("field", ["contract_digest", "adapter_digest", "tenant", "prompt_digest", "start", "end"])
def test_each_identity_field_alone_is_named(field: str) -> None:
    identity = make_identity(BASE, 9)
    value: object = {"tenant": "other", "start": 1, "end": 8}.get(field, b"x" * 32)
    with pytest.raises(Incompatible) as caught:
        check_identity(identity, replace(identity, **{field: value}))  # type: ignore[arg-type]
    assert [d.code for d in caught.value.differences] == [f"IDENTITY.{field}"]
    check_identity(identity, replace(identity))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def same(a: object, b: object) -> bool:
    """Equality that tells 0 from 0.0, False and -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


@given(values, values)
def test_only_equal_values_share_an_encoding(a: object, b: object) -> None:
    assert (encode(a) == encode(b)) == same(a, b)


def test_neighbours_never_meet() -> None:
    close: list[object] = [
        None,
        b"",
        "",
        (),
        ("",),
        (b"",),
        0,
        False,
        0.0,
        -0.0,
        "0",
        {},
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
    ]
    assert len({encode(value) for value in close}) == len(close)
    with pytest.raises(TypeError):
        encode({1, 2})


def test_prompts_are_told_apart() -> None:
    assert prompt_digest((1, 2)) != prompt_digest((2, 1))
    assert prompt_digest(()) != prompt_digest((0,))
