"""Well-formed inputs to start from: `python -m tests.fuzz.seeds` writes them into the corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cache_transfer.contract import Endpoint, Ticket
from pdserve.v1 import transfer_pb2 as pb
from tests.cache_transfer.by_hand import Requests, make_header, make_stream
from tests.cache_transfer.pages import Array
from tests.cache_transfer.support import INCARNATION
from tests.fuzz.handoff import CONTRACT, EXPECTED, HANDOFF, IDENTITY, PAYLOADS_AT, SECRET, TOKENS
from tests.fuzz.targets import QUEUE, SHARED, SIGNS, joined

CORPUS = Path(__file__).parent / "corpus"


def stream() -> Requests:
    """The whole handoff, as a sender made by hand sends it."""
    ticket = Ticket(HANDOFF, 1, INCARNATION, SECRET, 1000, IDENTITY.start, (Endpoint("127.0.0.1:1"),))
    return make_stream(ticket, IDENTITY, CONTRACT, _cache())


def _cache() -> dict[tuple[str, int], Array]:
    """[tokens, heads, bytes] of each plane; tokens before the range that travels stay zero."""
    cache: dict[tuple[str, int], Array] = {
        (plane.name, layer): np.zeros((TOKENS, plane.heads, plane.head_dim * 4), np.uint8)
        for layer, planes in enumerate(CONTRACT.planes)
        for plane in planes
    }
    for (plane, layer, head, token), value in EXPECTED.items():
        cache[plane, layer][token, head] = np.frombuffer(value, np.uint8)
    return cache


def _together(requests: Requests) -> bytes:
    frames = pb.Frames(frames=[request.frame for request in requests[1:-2]])
    return pb.PushRequest(frames=frames).SerializeToString()


def _shared(requests: Requests) -> list[bytes]:
    """Two messages for all frames, whose payloads lie one behind the other."""
    found, at = [], PAYLOADS_AT
    for request in requests[1:-2]:
        frame = request.frame
        found.append(pb.SharedFrame(header=frame.header, offset=at, size=len(frame.payload), digest=frame.digest))
        at += len(frame.payload)
    return [pb.PushRequest(shared=pb.SharedFrames(frames=part)).SerializeToString() for part in (found[:1], found[1:])]


def seeds() -> dict[str, dict[str, bytes]]:
    """Target -> name -> input."""
    requests = stream()
    messages = [request.SerializeToString() for request in requests]
    headers = {
        "whole": requests[1].frame.header,
        "wide": make_header(
            plane="k", layer=2**32 - 1, heads=[0, 2**32 - 1], tokens=[0, 2**32 - 1], seq=2**32 - 1, dtype="fp32"
        ),
    }
    streams = {
        "whole": joined(messages),
        "whole-signed": joined(messages, SIGNS),
        "two-frames": joined([*messages[:3], *messages[-2:]], SIGNS),
        "no-frames": joined([messages[0], *messages[-2:]], SIGNS),
        "opening": joined(messages[:1], SIGNS),
        "together": joined([messages[0], _together(requests), *messages[-2:]]),
        "together-signed": joined([messages[0], _together(requests), *messages[-2:]], SIGNS),
        "shared": joined([messages[0], *_shared(requests), *messages[-2:]], SHARED),
        "shared-signed": joined([messages[0], *_shared(requests), *messages[-2:]], SHARED | SIGNS),
        "queue": joined([messages[0], *_shared(requests), *messages[-2:]], QUEUE),
        "queue-signed": joined([messages[0], *_shared(requests), *messages[-2:]], QUEUE | SIGNS),
        "shared-not-agreed": joined([messages[0], *_shared(requests), *messages[-2:]], SIGNS),
    }
    pushes = {
        "open": messages[0],
        "frame": messages[1],
        "frames": _together(requests),
        "shared": _shared(requests)[0],
        "queued": pb.PushRequest(queued=pb.Queued(frames=4)).SerializeToString(),
        "logits": messages[-2],
        "commit": messages[-1],
    }
    return {"header": headers, "push": pushes, "receive": streams}


def main() -> None:
    for target, named in seeds().items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in named.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
