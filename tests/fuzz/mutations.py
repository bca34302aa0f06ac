"""Changes to a whole stream that single bytes hardly ever make: messages moved, headers rewritten."""

from __future__ import annotations

import random

import msgpack
from google.protobuf.message import DecodeError

from cache_transfer.codec import decode_header, encode_header
from cache_transfer.messages import FrameHeader
from pdserve.errors import InvalidRequest
from pdserve.v1 import transfer_pb2 as pb
from tests.fuzz.targets import joined, messages_of


def restructured(data: bytes, seed: int) -> bytes:
    """An input of the `receive` target with its messages repeated, dropped, swapped, or one header changed."""
    draw = random.Random(seed)
    messages = messages_of(data[1:])
    if not messages:
        return data
    at, to = draw.randrange(len(messages)), draw.randrange(len(messages))
    match draw.randrange(5):
        case 0:
            messages.insert(to, messages[at])
        case 1:
            del messages[at]
        case 2:
            messages[at], messages[to] = messages[to], messages[at]
        case 3:
            messages[at] = _other_header(messages[at], draw)
        case 4:
            messages[at] = _other_header(messages[at], draw, fits=True)
    return joined(_renumbered(messages), data[0])


def _renumbered(messages: list[bytes]) -> list[bytes]:
    """Frames counted from 0 again, as the receiver wants them."""
    found, seq = [], 0
    for data in messages:
        request, header = _frame(data)
        if request is not None and header is not None:
            fields = {**msgpack.unpackb(encode_header(header)), "seq": seq}
            request.frame.header = msgpack.packb(fields)
            data, seq = request.SerializeToString(), seq + 1
        found.append(data)
    return found


def _other_header(data: bytes, draw: random.Random, *, fits: bool = False) -> bytes:
    """One field of a frame's header drawn anew. `fits`: the payload gets the size that it now names."""
    request, header = _frame(data)
    if request is None or header is None:
        return data
    fields = msgpack.unpackb(encode_header(header))
    name = draw.choice(["plane", "layer", "heads", "tokens", "dtype"])
    start = draw.randrange(5)
    fields[name] = {
        "plane": draw.choice("kv"),
        "layer": draw.randrange(3),
        "heads": [start, start + draw.randrange(1, 3)],
        "tokens": [start, start + draw.randrange(1, 5)],
        "dtype": draw.choice(["fp32", "bf16", "float64"]),
    }[name]
    request.frame.header = msgpack.packb(fields)
    if fits:
        heads, tokens = fields["heads"], fields["tokens"]
        request.frame.payload = bytes((heads[1] - heads[0]) * (tokens[1] - tokens[0]) * 8)
    return request.SerializeToString()


def _frame(data: bytes) -> tuple[pb.PushRequest | None, FrameHeader | None]:
    try:
        request = pb.PushRequest.FromString(data)
        return request, decode_header(request.frame.header)
    except (DecodeError, InvalidRequest):
        return None, None
