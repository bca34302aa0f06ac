"""Frame headers and coverage, against random and hostile input."""

from __future__ import annotations

import itertools
import random

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from cache_transfer.codec import Coverage, decode_header, encode_header, payload_size
from cache_transfer.contract import CachePlane
from cache_transfer.digests import Manifest, frame_digest, logits_digest, proof
from cache_transfer.encoding import encode
from cache_transfer.messages import FrameHeader
from cache_transfer.outbox import Outbox
from pdserve.errors import DataLoss, Incompatible, Internal, InvalidRequest, PdserveError
from tests.cache_transfer.support import make_contract, make_identity

SECRET = bytes(range(32))

counts = st.integers(0, 2**32 - 1)
ranges = st.tuples(counts, counts).filter(lambda r: r[0] < r[1])
headers = st.builds(
    FrameHeader,
    plane=st.text(max_size=16),
    layer=counts,
    heads=ranges,
    tokens=ranges,
    seq=counts,
    dtype=st.sampled_from(["fp32", "fp16", "bf16", "float64"]),
)


@given(headers)
def test_headers_survive_the_wire(header: FrameHeader) -> None:
    encoded = encode_header(header)
    assert decode_header(encoded) == header
    assert decode_header(memoryview(encoded)) == header
    assert set(msgpack.unpackb(encoded)) == {"plane", "layer", "heads", "tokens", "seq", "dtype"}


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_read(data: bytes) -> None:
    try:
        header = decode_header(data)
    except InvalidRequest as error:
        assert error.reason == "FRAME_HEADER"
    else:
        assert decode_header(encode_header(header)) == header


@given(headers, st.integers(min_value=0), st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(header: FrameHeader, byte: int, bit: int) -> None:
    encoded = bytearray(encode_header(header))
    before = frame_digest(SECRET, bytes(encoded), b"payload")
    encoded[byte % len(encoded)] ^= 1 << bit
    assert frame_digest(SECRET, bytes(encoded), b"payload") != before


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(headers, st.sampled_from(["plane", "layer", "heads", "tokens", "seq", "dtype"]), anything)
def test_a_field_of_another_type_is_refused(header: FrameHeader, name: str, value: object) -> None:
    fields = {**msgpack.unpackb(encode_header(header)), name: value}
    try:
        read = decode_header(msgpack.packb(fields))
    except InvalidRequest as error:
        assert error.reason == "FRAME_HEADER"
    else:
        found = getattr(read, name)
        assert type(value) is (list if isinstance(found, tuple) else type(found))
        assert (list(found) if isinstance(found, tuple) else found) == value


@st.composite
def plans(draw: st.DrawFn) -> tuple[Outbox, int, int, int, random.Random]:
    layers = draw(st.integers(1, 3))
    contract = make_contract(
        layers=layers, heads=draw(st.integers(1, 4)), head_dim=draw(st.integers(1, 5)), dtype="fp16"
    )
    start = draw(st.integers(0, 20))
    end = start + draw(st.integers(0, 30))
    limit = draw(st.integers(10, 200))
    box = Outbox(contract, start, end)
    cuts = sorted(draw(st.sets(st.integers(start, end), max_size=4)) | {0, end})
    announcements = [(layer, span) for layer in range(layers) for span in itertools.pairwise(cuts)]
    rng = draw(st.randoms(use_true_random=False))
    rng.shuffle(announcements)
    for layer, span in announcements:
        box.announce(layer, span)
        if rng.random() < 0.3:
            box.announce(layer, span)  # said twice
    return box, start, end, limit, rng


@given(plans())
def test_what_an_outbox_plans_covers_everything_once(plan: tuple[Outbox, int, int, int, random.Random]) -> None:
    box, start, end, limit, _ = plan
    contract = box._contract
    coverage = Coverage(contract, start, end, limit)
    assert coverage.complete == (start == end)
    seen: set[tuple[str, int, int, int]] = set()
    while taken := box.take(max_bytes=500, max_payload_bytes=limit):
        for header in taken:
            size = payload_size(contract, header)
            assert size <= limit
            coverage.accept(header, size)
            for head in range(*header.heads):
                for token in range(*header.tokens):
                    cell = (header.plane, header.layer, head, token)
                    assert cell not in seen
                    seen.add(cell)
    assert box.done
    assert coverage.complete
    assert len(seen) == (end - start) * sum(plane.heads for planes in contract.planes for plane in planes)


@given(plans())
def test_coverage_refuses_every_lost_repeated_or_moved_frame(
    plan: tuple[Outbox, int, int, int, random.Random],
) -> None:
    box, start, end, limit, rng = plan
    contract = box._contract
    frames = box.take(max_bytes=1 << 30, max_payload_bytes=limit)
    if not frames:
        return
    at = rng.randrange(len(frames))
    for changed in (frames[:at] + frames[at + 1 :], frames[: at + 1] + frames[at:]):
        coverage = Coverage(contract, start, end, limit)
        try:
            for seq, header in enumerate(changed):
                renumbered = FrameHeader(header.plane, header.layer, header.heads, header.tokens, seq, header.dtype)
                coverage.accept(renumbered, payload_size(contract, header))
        except DataLoss as error:
            assert error.reason in {"FRAME_GAP", "FRAME_OVERLAP"}
        else:
            assert not coverage.complete
            assert coverage.missing() != "nothing"


def header_of(**changes: object) -> FrameHeader:
    fields: dict[str, object] = {"plane": "k", "layer": 0, "heads": (0, 3), "tokens": (2, 4), "seq": 0, "dtype": "fp32"}
    return FrameHeader(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_refused_frame_changes_nothing() -> None:
    """After every refusal the frame that was due is still taken, and completes the plane."""
    contract = make_contract(layers=1)
    coverage = Coverage(contract, 2, 4, 1 << 20)
    size = 2 * 3 * 4 * 4
    bad: list[tuple[FrameHeader, int, str]] = [
        (header_of(seq=1), size, "FRAME_SEQUENCE"),
        (header_of(plane="q"), size, "FRAME_PLANE"),
        (header_of(layer=1), size, "FRAME_PLANE"),
        (header_of(dtype="bf16"), size, "FRAME_DTYPE"),
        (header_of(heads=(0, 4)), size, "FRAME_HEADS"),
        (header_of(tokens=(1, 3)), size, "FRAME_TOKENS"),
        (header_of(tokens=(3, 5)), size, "FRAME_TOKENS"),
        (header_of(tokens=(3, 4)), size // 2, "FRAME_GAP"),
        (header_of(), size - 1, "FRAME_SIZE"),
        (header_of(), size + 1, "FRAME_SIZE"),
    ]
    for header, given_size, reason in bad:
        with pytest.raises(PdserveError) as caught:
            coverage.accept(header, given_size)
        assert caught.value.reason == reason
    coverage.accept(header_of(), size)
    with pytest.raises(DataLoss) as lost:
        coverage.accept(header_of(seq=1, heads=(1, 2)), size // 3)
    assert lost.value.reason == "FRAME_OVERLAP"
    assert coverage.missing() == "plane v of layer 0, head 0, tokens [2, 4)"
    coverage.accept(header_of(seq=1, plane="v"), size)
    assert coverage.complete


def test_a_frame_may_not_exceed_the_granted_size() -> None:
    coverage = Coverage(make_contract(), 2, 4, 95)
    with pytest.raises(InvalidRequest) as caught:
        coverage.accept(header_of(), 96)
    assert caught.value.reason == "FRAME_SIZE"


def test_one_row_above_the_frame_size_cannot_be_sent() -> None:
    box = Outbox(make_contract(head_dim=8), 0, 4)
    box.announce(0, (0, 4))
    with pytest.raises(Incompatible, match="head_dim") as caught:
        box.take(100, max_payload_bytes=31)
    assert caught.value.reason == "FRAME_SIZE"


def test_an_unknown_layer_cannot_be_announced() -> None:
    with pytest.raises(Internal, match="layer 3"):
        Outbox(make_contract(layers=3), 0, 4).announce(3, (0, 4))


def test_planes_may_differ_in_size() -> None:
    contract = make_contract()
    assert payload_size(contract, header_of(tokens=(0, 10))) == 10 * 3 * 4 * 4
    assert CachePlane("k", 3, 4) == contract.planes[0][0]


# The definitions of docs/protocol.md, written out.


def keyed(data: bytes) -> bytes:
    return blake3(data, key=SECRET).digest()


def test_digests_are_as_documented() -> None:
    identity = make_identity(make_contract(), 5)
    assert proof(SECRET, identity) == keyed(b"pd-proof" + encode(identity))
    assert frame_digest(SECRET, b"header", b"payload") == keyed(b"pd-frame\x06\x00\x00\x00headerpayload")
    assert logits_digest(SECRET, "fp32", 7, b"data") == keyed(b"pd-logit\x04\x00\x00\x00fp32\x07\x00\x00\x00data")
    manifest = Manifest(SECRET, identity)
    manifest.add(b"a" * 32, 10)
    manifest.add(b"b" * 32, 20)
    counts_of = b"\x02\0\0\0" + b"\x1e" + b"\0" * 7 + b"\x03\0\0\0" + b"\x05\0\0\0"
    expected = keyed(b"pd-manif" + b"a" * 32 + b"b" * 32 + b"l" * 32 + identity.digest() + counts_of)
    assert manifest.digest(b"l" * 32, 3, 5) == expected
    assert manifest.digest(b"l" * 32, 3, 5) == expected  # reading it changes nothing
