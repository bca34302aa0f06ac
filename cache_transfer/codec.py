"""Frame headers: their bytes, and whether what they claim may be received.

A header is a msgpack map with exactly these keys:

    plane   str           name of a cache plane of the layer
    layer   int           from 0
    heads   [int, int]    half open, KV heads of the plane
    tokens  [int, int]    half open, positions in the sequence
    seq     int           number of the frame on its stream, from 0
    dtype   str           of the payload

Everything is checked against the contract and the grant before a byte is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import msgpack

from cache_transfer.contract import WorkerContract
from cache_transfer.messages import FrameHeader
from cache_transfer.pages import Range
from cache_transfer.refusals import data_loss
from pdserve.errors import InvalidRequest

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "float64": 8}
MAX_HEADER_BYTES = 256

_KEYS = frozenset({"plane", "layer", "heads", "tokens", "seq", "dtype"})


def encode_header(header: FrameHeader) -> bytes:
    fields = {
        "plane": header.plane,
        "layer": header.layer,
        "heads": header.heads,
        "tokens": header.tokens,
        "seq": header.seq,
        "dtype": header.dtype,
    }
    encoded: bytes = msgpack.packb(fields)
    return encoded


def decode_header(data: bytes | memoryview) -> FrameHeader:
    """Raises InvalidRequest (FRAME_HEADER) for anything but one map with exactly the known keys."""
    if len(data) > MAX_HEADER_BYTES:
        _bad_header(f"has {len(data)} bytes, more than {MAX_HEADER_BYTES}")
    try:
        fields = msgpack.unpackb(data, max_map_len=len(_KEYS), max_array_len=2, max_bin_len=0, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        _bad_header(f"is not msgpack: {error}")
    if not isinstance(fields, dict):
        _bad_header("is not a map")
    if fields.keys() != _KEYS or _pairs(data) != len(_KEYS):  # a key that came twice is once in `fields`
        _bad_header(f"has the keys {list(fields)} in {_pairs(data)} pairs, not {sorted(_KEYS)}")
    return FrameHeader(
        plane=_text("plane", fields["plane"]),
        layer=_count("layer", fields["layer"]),
        heads=_range("heads", fields["heads"]),
        tokens=_range("tokens", fields["tokens"]),
        seq=_count("seq", fields["seq"]),
        dtype=_text("dtype", fields["dtype"]),
    )


def payload_size(contract: WorkerContract, header: FrameHeader) -> int:
    """Bytes of the payload that a valid header names."""
    head_dim = next(p.head_dim for p in contract.planes[header.layer] if p.name == header.plane)
    tokens = header.tokens[1] - header.tokens[0]
    return tokens * (header.heads[1] - header.heads[0]) * head_dim * ITEM_BYTES[header.dtype]


@dataclass
class _Plane:
    """Token up to which each head of one plane of one layer has been received."""

    head_dim: int
    received: list[int]


class Coverage:
    """What has been received of tokens [start, end) in every plane, layer and head.

    Heads may travel in any grouping, but the tokens of a head travel in order and without
    gaps. So one number per head says all: below it everything arrived exactly once.
    """

    def __init__(self, contract: WorkerContract, start: int, end: int, max_payload_bytes: int, dtype: str = "") -> None:
        """`dtype` of the frames; empty: the contract's."""
        self._start, self._end = start, end
        self._max_payload_bytes = max_payload_bytes
        self._dtype = dtype or contract.kv_dtype
        self._next_seq = 0
        self._planes = {
            (layer, plane.name): _Plane(plane.head_dim, [start] * plane.heads)
            for layer, planes in enumerate(contract.planes)
            for plane in planes
        }
        self._missing = sum(len(plane.received) for plane in self._planes.values()) * (end - start)

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def accept(self, header: FrameHeader, payload_bytes: int) -> None:
        """Counts the frame as received, or raises and changes nothing.

        Raises:
            InvalidRequest: FRAME_PLANE, FRAME_HEADS, FRAME_TOKENS, FRAME_DTYPE, FRAME_SIZE: a
                frame that no sender of this contract and grant could mean.
            DataLoss: FRAME_SEQUENCE, FRAME_GAP, FRAME_OVERLAP: a frame was lost, repeated or moved.
        """
        if header.seq != self._next_seq:
            raise data_loss(f"frame {header.seq} came where {self._next_seq} was due", "FRAME_SEQUENCE", "frame")
        plane = self._planes.get((header.layer, header.plane))
        if plane is None:
            _bad_frame("plane", f"layer {header.layer} has no plane {header.plane!r}")
        if header.dtype != self._dtype:
            _bad_frame("dtype", f"{header.dtype!r} was not agreed ({self._dtype})")
        h0, h1 = header.heads
        t0, t1 = header.tokens
        if not 0 <= h0 < h1 <= len(plane.received):
            _bad_frame("heads", f"[{h0}, {h1}) is not inside [0, {len(plane.received)})")
        if not self._start <= t0 < t1 <= self._end:
            _bad_frame("tokens", f"[{t0}, {t1}) is not inside [{self._start}, {self._end})")
        size = (t1 - t0) * (h1 - h0) * plane.head_dim * ITEM_BYTES[self._dtype]
        if size != payload_bytes or size > self._max_payload_bytes:
            _bad_frame("size", f"{payload_bytes} bytes for {size}, at most {self._max_payload_bytes}")
        self._check_order(plane.received[h0:h1], header)
        plane.received[h0:h1] = [t1] * (h1 - h0)
        self._missing -= (t1 - t0) * (h1 - h0)
        self._next_seq += 1

    def missing(self) -> str:
        """The first hole, for an error."""
        for (layer, name), plane in self._planes.items():
            for head, token in enumerate(plane.received):
                if token < self._end:
                    return f"plane {name} of layer {layer}, head {head}, tokens [{token}, {self._end})"
        return "nothing"

    def _check_order(self, received: list[int], header: FrameHeader) -> None:
        t0 = header.tokens[0]
        low, high = min(received), max(received)
        where = f"plane {header.plane} of layer {header.layer}, heads {list(header.heads)}"
        if t0 < high:
            raise data_loss(f"{where}: token {t0} was received before", "FRAME_OVERLAP", "frame")
        if t0 > low:
            raise data_loss(f"{where}: token {low} is due, not {t0}", "FRAME_GAP", "frame")


def _pairs(data: bytes | memoryview) -> int:
    """How many pairs a msgpack map has, in any of its three forms."""
    match data[0]:
        case 0xDE:
            return int.from_bytes(data[1:3], "big")
        case 0xDF:
            return int.from_bytes(data[1:5], "big")
        case first:
            return first & 0x0F


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        _bad_header(f"has a {name} that is not text")
    return value


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        _bad_header(f"has a {name} that is not a number in [0, 2^32)")
    return value


def _range(name: str, value: object) -> Range:
    if not isinstance(value, list) or len(value) != 2:
        _bad_header(f"has a {name} that is not [first, end]")
    first, end = (_count(name, item) for item in value)
    if first >= end:
        _bad_header(f"has an empty {name} range [{first}, {end})")
    return first, end


def _bad_header(problem: str) -> NoReturn:
    raise InvalidRequest(
        f"the frame header {problem}",
        reason="FRAME_HEADER",
        field="frame.header",
        remedy="write it as in docs/protocol.md, section 9",
    )


def _bad_frame(name: str, problem: str) -> NoReturn:
    raise InvalidRequest(
        problem,
        reason=f"FRAME_{name.upper()}",
        field=f"frame.{name}",
        remedy="cut frames as in docs/protocol.md, section 9",
    )
