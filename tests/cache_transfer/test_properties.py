"""Properties of the codec that hold for any input: what is accepted is exactly what may be, and nothing else."""

from __future__ import annotations

import itertools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_transfer import digests
from cache_transfer.codec import Coverage, decode_header, encode_header, payload_size
from cache_transfer.framing import FrameBuffer
from cache_transfer.messages import Commit, Frame, FrameHeader, Logits
from cache_transfer.pages import Range
from cache_transfer.push import decode_request, encode_request
from pdserve.errors import DataLoss, InvalidRequest, PdserveError
from tests.cache_transfer.support import make_contract

SECRET = bytes(range(32))
numbers = st.integers(0, 2**32 - 1)
spans = st.tuples(numbers, numbers).filter(lambda span: span[0] < span[1])
headers = st.builds(
    FrameHeader,
    plane=st.text(max_size=20),
    layer=numbers,
    heads=spans,
    tokens=spans,
    seq=numbers,
    dtype=st.text(max_size=10),
)


def frame_of(header: bytes, payload: bytes) -> bytes:
    buffer = FrameBuffer([(header, len(payload))])
    buffer.payloads[0][:] = payload
    return buffer.seal([digests.frame_digest(SECRET, header, payload)])


@given(headers, st.binary(min_size=1, max_size=100))
def test_any_frame_survives_the_wire(header: FrameHeader, payload: bytes) -> None:
    read = decode_request(frame_of(encode_header(header), payload))
    assert isinstance(read, Frame)
    assert decode_header(read.header) == header and bytes(read.payload) == payload
    assert read.digest == digests.frame_digest(SECRET, read.header, read.payload)


@given(st.text(max_size=20), st.binary(max_size=100), numbers, st.binary(min_size=32, max_size=32))
def test_any_logits_survive_the_wire(dtype: str, data: bytes, position: int, digest: bytes) -> None:
    logits = Logits(dtype, data, position, digest)
    assert decode_request(encode_request(logits)) == logits


@given(numbers, st.integers(0, 2**64 - 1), numbers, numbers, st.binary(min_size=32, max_size=32))
def test_any_commit_survives_the_wire(frames: int, size: int, start: int, end: int, digest: bytes) -> None:
    commit = Commit(frames, size, start, end, digest)
    assert decode_request(encode_request(commit)) == commit


edits = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "delete", "cut", "repeat"]), st.integers(0, 400), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    out = bytearray(data)
    for kind, place, value in changes:
        at = place % (len(out) or 1)
        match kind:
            case "set" if out:
                out[at] = value
            case "insert":
                out.insert(at, value)
            case "delete":
                del out[at : at + 1]
            case "cut":
                del out[at:]
            case "repeat":
                out[at:at] = out[at : at + 1 + value % 8]
    return bytes(out)


@given(headers, st.binary(min_size=1, max_size=60), edits)
def test_a_changed_frame_is_refused_or_says_the_same(
    header: FrameHeader, payload: bytes, changes: list[tuple[str, int, int]]
) -> None:
    """Parsing and digest together: no other header or payload ever comes out."""
    encoded = encode_header(header)
    try:
        read = decode_request(edited(frame_of(encoded, payload), changes))
        if not isinstance(read, Frame):
            return  # another message altogether, without a digest of its own: the stream's order refuses it
        if not digests.same(digests.frame_digest(SECRET, read.header, read.payload), read.digest):
            return
    except PdserveError as error:
        assert type(error) is InvalidRequest and error.reason.startswith("MALFORMED_")
    else:
        assert (bytes(read.header), bytes(read.payload)) == (encoded, payload)


@given(headers, edits)
def test_a_changed_header_is_refused_or_is_one(header: FrameHeader, changes: list[tuple[str, int, int]]) -> None:
    data = edited(encode_header(header), changes)
    try:
        read = decode_header(data)
    except PdserveError as error:
        assert (type(error), error.reason) == (InvalidRequest, "FRAME_HEADER")
        return
    fields = msgpack.unpackb(data)  # what any other reader sees
    assert {**fields, "heads": tuple(fields["heads"]), "tokens": tuple(fields["tokens"])} == vars(read)


# -- coverage, against an oracle that marks single cells ----------------------------------------

HEADS, START, END = 3, 2, 7
PLANES = [(layer, name) for layer in range(2) for name in ("k", "v")]
COVERED = make_contract(layers=2, heads=HEADS, head_dim=1)


class Cells:
    """What is accepted when one looks at every head and token alone."""

    def __init__(self) -> None:
        self.left = {(*plane, head): START for plane in PLANES for head in range(HEADS)}

    def accept(self, header: FrameHeader) -> bool:
        heads = [(header.layer, header.plane, head) for head in range(*header.heads)]
        if any(self.left.get(head) != header.tokens[0] for head in heads) or header.tokens[1] > END:
            return False
        self.left.update(dict.fromkeys(heads, header.tokens[1]))
        return True

    @property
    def complete(self) -> bool:
        return set(self.left.values()) == {END}


def spans_in(low: int, high: int) -> st.SearchStrategy[Range]:
    return st.sampled_from(list(itertools.combinations(range(low, high + 1), 2)))


rectangles = st.tuples(st.sampled_from(PLANES), spans_in(0, HEADS + 1), spans_in(START - 1, END + 1))


@st.composite
def tilings(draw: st.DrawFn) -> list[tuple[tuple[int, str], Range, Range]]:
    """Every cell once, heads in any groups, tokens in any pieces, planes in any order."""
    queues = []
    for plane in PLANES:
        for heads in _pieces(draw, 0, HEADS):
            queues.append([(plane, heads, tokens) for tokens in _pieces(draw, START, END)])
    found = []
    while queues:
        queue = queues[draw(st.integers(0, len(queues) - 1))]
        found.append(queue.pop(0))
        queues = [each for each in queues if each]
    return found


def _pieces(draw: st.DrawFn, low: int, high: int) -> list[Range]:
    cuts = draw(st.sets(st.integers(low + 1, high - 1)))
    return list(itertools.pairwise([low, *sorted(cuts), high]))


def header_of(rectangle: tuple[tuple[int, str], Range, Range], seq: int) -> FrameHeader:
    (layer, plane), heads, tokens = rectangle
    return FrameHeader(plane, layer, heads, tokens, seq, "fp32")


@given(tilings())
def test_coverage_takes_every_tiling(tiling: list[tuple[tuple[int, str], Range, Range]]) -> None:
    coverage = Coverage(COVERED, START, END, 1 << 20)
    for seq, rectangle in enumerate(tiling):
        assert not coverage.complete
        header = header_of(rectangle, seq)
        coverage.accept(header, payload_size(COVERED, header))
    assert coverage.complete


@given(tilings(), st.data())
def test_coverage_takes_nothing_but_tilings(
    tiling: list[tuple[tuple[int, str], Range, Range]], data: st.DataObject
) -> None:
    """Rectangles that do not belong are put among those of a tiling: each is judged as the oracle does."""
    for _ in range(data.draw(st.integers(1, 6))):
        tiling.insert(data.draw(st.integers(0, len(tiling))), data.draw(rectangles))
    if data.draw(st.booleans()):
        del tiling[data.draw(st.integers(0, len(tiling) - 1))]
    coverage, cells = Coverage(COVERED, START, END, 1 << 20), Cells()
    seq = 0
    for rectangle in tiling:
        header = header_of(rectangle, seq)
        fits = cells.accept(header)
        try:
            coverage.accept(header, payload_size(COVERED, header))
        except (DataLoss, InvalidRequest):
            assert not fits, header
        else:
            assert fits, header
            seq += 1
        assert coverage.complete == cells.complete
    with pytest.raises(DataLoss):
        coverage.accept(header_of(tiling[0], seq + 1), 0)
