"""Push streams made by hand: right ones, and the pieces from which wrong ones are made.

A Draft holds what will be sent, still without digests. `seal` adds them, so that a change made
before it is one that only the meaning can give away, and a change made after it is one that a
digest must catch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from cache_transfer import digests
from cache_transfer.codec import ITEM_BYTES
from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract
from cache_transfer.messages import INTEGRITY, MAX_PAYLOAD_BYTES
from cache_transfer.wire import contract_to_proto, identity_to_proto
from pdserve.v1 import transfer_pb2 as pb

Bytes = npt.NDArray[np.uint8]
Cache = dict[tuple[int, str], Bytes]  # (layer, plane) -> [tokens, heads, head_dim * item bytes]


@dataclass
class FrameDraft:
    header: dict[str, Any] | bytes  # fields of the msgpack map, or the bytes themselves
    payload: bytes

    def packed(self) -> bytes:
        packed: bytes = self.header if isinstance(self.header, bytes) else msgpack.packb(self.header)
        return packed


@dataclass
class Draft:
    """One stream in the making. `identity` is what the opening's proof is made over."""

    ticket: Ticket
    identity: HandoffIdentity
    opening: pb.PushOpen  # proof is set by `seal`
    frames: list[FrameDraft]
    logits: pb.Logits  # digest is set by `seal`

    def renumber(self) -> None:
        """`seq` of every frame as its place on the stream."""
        for seq, frame in enumerate(self.frames):
            if isinstance(frame.header, dict):
                frame.header["seq"] = seq

    def seal(self, **commit: int) -> list[pb.PushRequest]:
        """open, frames, logits, commit, each with the digest that fits; `commit` overrides what the commit says."""
        secret = self.ticket.secret
        self.opening.proof = digests.proof(secret, self.identity)
        manifest = digests.Manifest(secret, self.identity)
        frames = []
        for frame in self.frames:
            header = frame.packed()
            digest = digests.frame_digest(secret, header, frame.payload)
            manifest.add(digest, len(frame.payload))
            frames.append(pb.PushRequest(frame=pb.Frame(header=header, payload=frame.payload, digest=digest)))
        logits = self.logits
        logits.digest = digests.logits_digest(secret, logits.dtype, logits.position, logits.data)
        start = self.identity.end if self.opening.logits_only else self.identity.start
        said = {
            "frames": manifest.frames,
            "payload_bytes": manifest.payload_bytes,
            "start": start,
            "end": self.identity.end,
            **commit,
        }
        last = pb.Commit(digest=manifest.digest(logits.digest, start, self.identity.end), **said)
        return [
            pb.PushRequest(open=self.opening),
            *frames,
            pb.PushRequest(logits=logits),
            pb.PushRequest(commit=last),
        ]

    def messages(self) -> list[bytes]:
        """The sealed stream as it travels."""
        return wire(self.seal())


def wire(requests: list[pb.PushRequest]) -> list[bytes]:
    return [request.SerializeToString() for request in requests]


def together(requests: list[pb.PushRequest], count: int) -> list[pb.PushRequest]:
    """The same stream with up to `count` frames in each message of frames."""
    frames = [request.frame for request in requests if request.HasField("frame")]
    parts = [frames[first : first + count] for first in range(0, len(frames), count)]
    return [requests[0], *(pb.PushRequest(frames=pb.Frames(frames=part)) for part in parts), *requests[-2:]]


def make_draft(
    ticket: Ticket,
    identity: HandoffIdentity,
    contract: WorkerContract,
    cache: Cache,
    scores: Bytes,
    *,
    logits_only: bool = False,
    tokens_per_frame: int = 0,
    heads_per_frame: int = 0,
) -> Draft:
    """A right stream.

    Args:
        cache: of all tokens; those before `identity.start` are not sent.
        scores: the logits' bytes.
        tokens_per_frame: 0: two frames for each plane of each layer, as far as they may be that large.
        heads_per_frame: 0: all heads.
    """
    opening = make_opening(ticket, identity, contract, logits_only=logits_only)
    start = identity.end if logits_only else identity.start
    boxes = () if logits_only else _boxes(contract, start, identity.end, tokens_per_frame, heads_per_frame)
    frames = [
        FrameDraft(
            {
                "plane": plane,
                "layer": layer,
                "heads": [h0, h1],
                "tokens": [t0, t1],
                "seq": seq,
                "dtype": contract.kv_dtype,
            },
            payload_of(cache, layer, plane, (h0, h1), (t0, t1)),
        )
        for seq, (layer, plane, h0, h1, t0, t1) in enumerate(boxes)
    ]
    logits = pb.Logits(dtype=logits_dtype(contract), data=scores.tobytes(), position=identity.end - 1)
    return Draft(ticket, identity, opening, frames, logits)


def make_opening(
    ticket: Ticket, identity: HandoffIdentity, contract: WorkerContract, *, logits_only: bool = False
) -> pb.PushOpen:
    """What the holder of the ticket sends first."""
    return pb.PushOpen(
        handoff_id=ticket.handoff_id,
        attempt=ticket.attempt,
        incarnation=ticket.incarnation,
        proof=digests.proof(ticket.secret, identity),
        identity=identity_to_proto(identity),
        contract=contract_to_proto(contract),
        kv_dtype=contract.kv_dtype,
        logits_only=logits_only,
        integrity=INTEGRITY,
    )


def payload_of(cache: Cache, layer: int, plane: str, heads: tuple[int, int], tokens: tuple[int, int]) -> bytes:
    """The canonical payload [tokens, heads, head_dim]."""
    return np.ascontiguousarray(cache[layer, plane][slice(*tokens), slice(*heads)]).tobytes()


def logits_dtype(contract: WorkerContract) -> str:
    return "float64" if contract.activation_dtype == "float64" else "fp32"


def make_cache(contract: WorkerContract, tokens: int, seed: int) -> Cache:
    """Small normal numbers in the contract's dtype: a cache like any other."""
    draw = np.random.default_rng(seed)
    cache = {}
    for layer, planes in enumerate(contract.planes):
        for plane in planes:
            values = draw.normal(scale=0.3, size=(tokens, plane.heads, plane.head_dim))
            cache[layer, plane.name] = as_bytes(values, contract.kv_dtype)
    return cache


def make_scores(contract: WorkerContract, best: Mapping[int, float], seed: int = 0) -> Bytes:
    """Raw logits of which those in `best` are given and all others are below 1."""
    values = np.random.default_rng(seed).uniform(-1.0, 1.0, contract.vocab_size)
    for token, score in best.items():
        values[token] = score
    return as_bytes(values, logits_dtype(contract))


def as_bytes(values: npt.NDArray[np.float64], dtype: str) -> Bytes:
    """Little endian, the last axis in bytes. bf16 is cut from fp32, not rounded."""
    match dtype:
        case "float64":
            return values.astype("<f8").view(np.uint8)
        case "fp16":
            return values.astype("<f2").view(np.uint8)
        case "bf16":
            wide = np.ascontiguousarray(values.astype("<f4")).view("<u4")
            return (wide >> np.uint32(16)).astype("<u2").view(np.uint8)
    return values.astype("<f4").view(np.uint8)


def _boxes(
    contract: WorkerContract, start: int, end: int, tokens: int, heads: int
) -> Iterator[tuple[int, str, int, int, int, int]]:
    """(layer, plane, first head, end head, first token, end token) of each frame; a head's tokens in order."""
    for layer, planes in enumerate(contract.planes):
        for plane in planes:
            row = plane.head_dim * ITEM_BYTES[contract.kv_dtype]
            wide = min(heads or plane.heads, plane.heads, max(1, MAX_PAYLOAD_BYTES // row))
            long = min(tokens or -(-(end - start) // 2), max(1, MAX_PAYLOAD_BYTES // (row * wide)))
            for h0 in range(0, plane.heads, wide):
                for t0 in range(start, end, long):
                    yield layer, plane.name, h0, min(h0 + wide, plane.heads), t0, min(t0 + long, end)
