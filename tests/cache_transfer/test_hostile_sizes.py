"""Sizes that a peer only claims cost nothing: what is allocated is bounded by what has arrived.

Measured with tracemalloc, which sees everything that Python, msgpack and numpy allocate here.
"""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest

from cache_transfer.codec import MAX_HEADER_BYTES, Coverage, decode_header
from cache_transfer.framing import varint
from cache_transfer.messages import FrameHeader
from cache_transfer.push import decode_request
from cache_transfer.wire import contract_to_proto
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.v1 import common_pb2
from pdserve.v1 import transfer_pb2 as pb
from tests.cache_transfer.by_hand import make_header
from tests.cache_transfer.support import make_contract
from tests.fuzz.handoff import IDENTITY
from tests.fuzz.seeds import stream
from tests.fuzz.targets import SIGNS, close, joined, outcome, receive

KIB = 1 << 10
MIB = 1 << 20
FRAME = stream()[1].SerializeToString()


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that `work` allocates at most, above what is there before."""
    work_done: list[object] = []
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        try:
            work_done.append(work())
        except PdserveError as error:
            work_done.append(error.reason)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def largest(kind: str, size: int) -> bytes:
    """The start of a msgpack value that says it has `size` items or bytes."""
    return {
        "array": b"\xdd", "map": b"\xdf", "text": b"\xdb", "bytes": b"\xc6", "ext": b"\xc9"
    }[kind] + size.to_bytes(4, "big") + (b"\x01" if kind == "ext" else b"")  # fmt: skip


BOMBS = {
    **{f"{kind} of 2^32": largest(kind, 2**32 - 1) for kind in ("array", "map", "text", "bytes", "ext")},
    **{f"{kind} inside a map": b"\x86\xa5plane" + largest(kind, 2**32 - 1) for kind in ("array", "map", "text", "ext")},
    "arrays nested as deep as fits": b"\x91" * MAX_HEADER_BYTES,
    "arrays nested deeper": b"\x91" * 1_000_000,
    "maps nested as deep as fits": b"\x81\xa0" * (MAX_HEADER_BYTES // 2),
    "maps nested deeper": b"\x81\xa0" * 500_000,
    "arrays of two, nested": (b"\x92" * 64 + b"\xc0" * 65)[:MAX_HEADER_BYTES],
    "a long text": msgpack.packb({"plane": "k" * MIB}),
    "a timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "a number of any length as text": msgpack.packb({"layer": "9" * 200}),
    "a pickle": pickle.dumps({"plane": "k", "layer": 0}),
    "a pickle of a call": b"cposix\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_a_header_that_claims_much_costs_little(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_header(data)
    assert caught.value.reason == "FRAME_HEADER" and len(str(caught.value)) < 2000
    assert peak_of(lambda: decode_header(data)) < 64 * KIB


MESSAGES = {
    "a frame of 2^34 bytes": b"\x12" + varint(2**34) + FRAME[2:],
    "a frame whose length never ends": b"\x12" + b"\xff" * 64,
    "a payload of 2^34 bytes": b"\x12" + varint(9) + b"\x0a\x00" + b"\x12" + varint(2**34),
    "logits of 2^31 bytes": b"\x1a" + varint(2**31 - 1) + b"\x12" + varint(2**31 - 8),
    "a commit that is a group": b"\x23" * 1000,
    "an opening of 2^31 bytes": b"\x0a" + varint(2**31 - 1) + b"\x0a\x10",
    "a pickle": pickle.dumps([b"x"] * 8),
}


@pytest.mark.parametrize("data", MESSAGES.values(), ids=MESSAGES)
def test_a_message_that_claims_much_costs_little(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_request(data)
    assert caught.value.reason == "MALFORMED_MESSAGE"
    assert peak_of(lambda: decode_request(data)) < 64 * KIB


SHAPES = [
    {"tokens": [0, 2**32 - 1]},
    {"heads": [0, 2**32 - 1]},
    {"tokens": [0, 2**32 - 1], "heads": [0, 2**8]},  # 2^40 rows
    {"tokens": [1, 2], "heads": [0, 2**20]},
    {"layer": 2**32 - 1},
    {"seq": 2**32 - 1},
]


@pytest.mark.parametrize("claim", SHAPES, ids=str)
def test_a_shape_of_two_to_the_forty_is_refused_before_it_is_made(claim: dict[str, object]) -> None:
    """Well-formed, signed with the right key, and impossible."""
    requests = stream()
    fields = {**msgpack.unpackb(requests[1].frame.header), **claim}
    requests[1].frame.header = make_header(**fields)
    data = joined([request.SerializeToString() for request in requests], SIGNS)
    receive(data)  # whatever the receiver makes once
    try:
        assert outcome([request.SerializeToString() for request in requests], signs=True) is not None
        assert peak_of(lambda: receive(data)) < 256 * KIB
    finally:
        close()


@pytest.mark.parametrize("kind", ["heads", "tokens", "both"])
def test_coverage_is_as_large_as_our_own_contract_whatever_a_frame_says(kind: str) -> None:
    contract = make_contract()
    huge = (0, 2**32 - 1)
    header = FrameHeader("k", 0, huge if kind != "tokens" else (0, 3), huge if kind != "heads" else (0, 4), 0, "fp32")
    coverage = Coverage(contract, 0, 8, 1 << 20)
    assert peak_of(lambda: coverage.accept(header, 64)) < 16 * KIB


def opening_of(contract: common_pb2.WorkerContract) -> bytes:
    request = pb.PushRequest.FromString(stream()[0].SerializeToString())
    request.open.contract.CopyFrom(contract)
    return request.SerializeToString()


def test_a_contract_of_a_whole_message_costs_a_few_times_its_size() -> None:
    """4 MiB of layers, planes or notes: refused by count before any of them becomes an object of ours."""
    base = contract_to_proto(make_contract(layers=1))
    layers = common_pb2.WorkerContract()
    layers.CopyFrom(base)
    layers.layers.extend([base.layers[0]] * 100_000)
    notes = common_pb2.WorkerContract()
    notes.CopyFrom(base)
    for number in range(50_000):
        notes.info[f"note {number}"] = "x" * 40
    planes = common_pb2.WorkerContract()
    planes.CopyFrom(base)
    planes.layers[0].planes.extend([base.layers[0].planes[0]] * 200_000)
    for contract in (layers, notes, planes):
        data = opening_of(contract)
        assert len(data) > MIB
        with pytest.raises(InvalidRequest) as caught:
            decode_request(data)
        assert caught.value.reason == "MALFORMED_CONTRACT"
        assert peak_of(lambda: decode_request(data)) < 256 * KIB  # noqa: B023


def test_the_largest_contract_that_is_read_is_bounded_too() -> None:
    """Every limit used to the full. It is compared field by field, and refused."""
    base = contract_to_proto(make_contract(layers=1))
    plane = common_pb2.CachePlane(name="p", heads=2**16, head_dim=2**20)
    del base.layers[0].planes[:]
    base.layers[0].planes.extend(
        [common_pb2.CachePlane(name=f"p{i}", heads=plane.heads, head_dim=plane.head_dim) for i in range(16)]
    )
    base.layers.extend([base.layers[0]] * 255)
    data = opening_of(base)
    assert len(data) < 4 * MIB
    assert peak_of(lambda: decode_request(data)) < 48 * MIB
    messages = [data, *(request.SerializeToString() for request in stream()[1:])]
    try:
        error = outcome(messages, signs=True)
        assert error is not None and error.reason == "CONTRACT_MISMATCH"
        assert replace(IDENTITY) == IDENTITY
    finally:
        close()
