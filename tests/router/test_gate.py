"""The gate: who fits whom, and why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from cache_transfer.contract import CachePlane, WorkerContract
from pdserve.errors import Incompatible, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from router.gate import Gate, Match, Member, explain, narrowed, without
from tests.router.support import contract, member

C = contract()
PLANES = C.planes


def with_position(**changes: object) -> WorkerContract:
    return replace(C, positions=replace(C.positions, **changes))  # type: ignore[arg-type]


def with_attention(**changes: object) -> WorkerContract:
    return replace(C, attention=replace(C.attention, **changes))  # type: ignore[arg-type]


def with_plane(*planes: CachePlane) -> WorkerContract:
    return replace(C, planes=(PLANES[0], planes))


def ids(match: Match) -> tuple[list[str], list[str]]:
    return [member.id for member in match.prefills], [member.id for member in match.decodes]


MUST_EQUAL = {
    "CONTRACT_VERSION": replace(C, version=2),
    "MODEL_DIGEST": replace(C, model_digest=b"x" * 32),
    "POSITION_SCHEME.kind": with_position(kind="learned"),
    "POSITION_SCHEME.theta": with_position(theta=500000.0),
    "POSITION_SCHEME.dims": with_position(dims=4),
    "POSITION_SCHEME.scaling": with_position(scaling="llama3"),
    "POSITION_SCHEME.scaling_parameters": with_position(scaling_parameters=(("factor", 8.0),)),
    "POSITION_SCHEME.original_max_positions": with_position(original_max_positions=8192),
    "POSITION_SCHEME.interleaved": with_position(interleaved=True),
    "POSITION_SCHEME.keys_cached_rotated": with_position(keys_cached_rotated=False),
    "ATTENTION.scale": with_attention(scale=1.0),
    "ATTENTION.soft_cap": with_attention(soft_cap=30.0),
    "ATTENTION.sliding_window": with_attention(sliding_window=(0, 64)),
    "LAYERS": replace(C, planes=PLANES[:1]),
    "PLANES[1]": with_plane(PLANES[1][0], replace(PLANES[1][1], name="w")),
    "PLANES[1].k.heads": with_plane(replace(PLANES[1][0], heads=1), PLANES[1][1]),
    "PLANES[1].v.head_dim": with_plane(PLANES[1][0], replace(PLANES[1][1], head_dim=4)),
    "VOCAB_SIZE": replace(C, vocab_size=321),
    "TOKENIZER_DIGEST": replace(C, tokenizer_digest=b""),
}
LOSSY = {
    "KV_DTYPE": replace(C, kv_dtype="bf16"),
    "WEIGHT_DTYPE": replace(C, weight_dtype="bf16"),
    "ACTIVATION_DTYPE": replace(C, activation_dtype="bf16"),
}
CONVERTIBLE = {
    "PAGE_SIZE": replace(C, page_size=32),
    "PAGE_AXIS_ORDER": replace(C, page_axis_order="nhd"),
    "DEVICE": replace(C, device="cuda"),
}


@pytest.mark.parametrize("code", MUST_EQUAL)
@pytest.mark.parametrize("allow_lossy", [False, True])
def test_each_must_equal_field_alone_refuses_and_is_named(code: str, allow_lossy: bool) -> None:
    members = [member("p", PREFILL), member("d", DECODE, MUST_EQUAL[code])]
    verdict = Gate(allow_lossy).judge(members)
    assert verdict.matches == ()
    (rejection,) = verdict.rejections
    assert code in [difference.code for difference in rejection.differences]
    error = explain(members, verdict, "tiny")
    assert isinstance(error, Incompatible)
    assert error.differences == rejection.differences
    assert code in str(error) and "p -> d" in str(error)


@pytest.mark.parametrize("code", LOSSY)
@pytest.mark.parametrize("consent", list(itertools.product([False, True], repeat=3)))
def test_a_lossy_difference_refuses_unless_router_and_both_workers_allow_it(
    code: str, consent: tuple[bool, bool, bool]
) -> None:
    prefill, decode, router = consent
    left = member("p", PREFILL, replace(C, allow_lossy=prefill))
    right = member("d", DECODE, replace(LOSSY[code], allow_lossy=decode))
    gate = Gate(router)
    verdict = gate.judge([left, right])
    assert gate.fits(left, right) == all(consent)
    if all(consent):
        assert [(d.code, d.kind) for d in verdict.matches[0].conversions] == [(code, "lossy")]
        return
    assert [d.code for d in verdict.rejections[0].differences] == [code]
    error = explain([left, right], verdict, "tiny")
    assert error.field == code and "allow_lossy" in error.remedy


def test_workers_that_consent_and_workers_that_do_not_are_told_apart() -> None:
    """Equal in all else, so only one of them may be paired across precisions."""
    willing, other = replace(C, allow_lossy=True), replace(LOSSY["KV_DTYPE"], allow_lossy=True)
    members = [member("p0", PREFILL, willing), member("p1", PREFILL), member("d", DECODE, other)]
    verdict = Gate(allow_lossy=True).judge(members)
    assert [[p.id for p in match.prefills] for match in verdict.matches] == [["p0"]]
    assert [rejection.prefill_ids for rejection in verdict.rejections] == [("p1",)]


@pytest.mark.parametrize("code", CONVERTIBLE)
def test_a_convertible_difference_fits_and_is_noted(code: str) -> None:
    verdict = Gate().judge([member("p", PREFILL), member("d", DECODE, CONVERTIBLE[code])])
    assert verdict.rejections == ()
    assert [d.code for d in verdict.matches[0].conversions] == [code]


def test_informational_differences_neither_refuse_nor_split_groups() -> None:
    other = replace(C, context_limit=99, info={"torch": "2"})
    left, right = member("p", PREFILL), member("d", DECODE, other)
    gate = Gate()
    (match,) = gate.judge([left, right]).matches
    assert match.conversions == () and left.group == right.group
    assert {d.code for d in gate.differences(left, right)} == {"CONTEXT_LIMIT", "INFO.torch"}


def test_fitting_pairs_are_found_among_others_and_reasons_are_kept_once_per_group() -> None:
    stranger = MUST_EQUAL["MODEL_DIGEST"]
    members = [
        *(member(f"p{i}", PREFILL) for i in range(2)),
        *(member(f"d{i}", DECODE) for i in range(2)),
        *(member(f"x{i}", DECODE, stranger) for i in range(3)),
    ]
    verdict = Gate().judge(members)
    (match,) = verdict.matches
    assert ids(match) == (["p0", "p1"], ["d0", "d1"])
    assert [(pair.prefill.id, pair.decode.id) for pair in match.pairs()] == [
        (f"p{i}", f"d{j}") for i in range(2) for j in range(2)
    ]
    assert verdict.notes == (f"p0, p1 -> x0, x1, x2 refused: MODEL_DIGEST: {b'm'.hex() * 8} != {b'x'.hex() * 8}",)


@pytest.mark.parametrize(
    ("roles", "reason", "named"),
    [
        ((), "NO_WORKER", "no prefill and no decode worker"),
        ((PREFILL,), "NO_DECODE_WORKER", "no decode worker"),
        ((DECODE,), "NO_PREFILL_WORKER", "no prefill worker"),
    ],
)
def test_a_missing_pool_is_named(roles: tuple[str, ...], reason: str, named: str) -> None:
    members = [member(role, role) for role in roles]
    error = explain(members, Gate().judge(members), "tiny")
    assert isinstance(error, Unavailable)
    assert error.reason == reason and named in error.message


def of_two_groups() -> tuple[Match, ...]:
    """p0 and p1 fit d0 and d1 of one page size, and d2 of another."""
    members = [
        *(member(f"p{i}", PREFILL) for i in range(2)),
        *(member(f"d{i}", DECODE) for i in range(2)),
        member("d2", DECODE, CONVERTIBLE["PAGE_SIZE"]),
    ]
    return Gate().judge(members).matches


def names(matches: Iterable[Match]) -> set[tuple[str, str]]:
    pairs = [(pair.prefill.id, pair.decode.id) for match in matches for pair in match.pairs()]
    assert len(pairs) == len(set(pairs))
    return set(pairs)


def key(prefill: str, decode: str) -> tuple[bytes, bytes]:
    return member(prefill, PREFILL).record.incarnation, member(decode, DECODE).record.incarnation


def test_tried_pairs_are_left_out_and_no_other() -> None:
    everything = {(p, d) for p in ("p0", "p1") for d in ("d0", "d1", "d2")}
    assert names(without(of_two_groups(), ())) == everything
    tried = {("p0", "d0"), ("p0", "d2"), ("p1", "d2")}
    assert names(without(of_two_groups(), {key(*pair) for pair in tried})) == everything - tried
    assert without(of_two_groups(), {key(*pair) for pair in everything}) == ()


def test_a_match_without_one_of_its_sides_is_none() -> None:
    def but(*unwanted: str) -> Callable[[Member], bool]:
        return lambda member: member.id not in unwanted

    assert names(narrowed(of_two_groups(), but("p1", "d1"))) == {("p0", "d0"), ("p0", "d2")}
    assert names(narrowed(of_two_groups(), but("d0", "d1"))) == {("p0", "d2"), ("p1", "d2")}
    assert narrowed(of_two_groups(), but("p0", "p1")) == ()
