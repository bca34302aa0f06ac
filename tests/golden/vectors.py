"""What a golden vector is, and how the handoff in it is made. Nothing random goes in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from cache_transfer.contract import (
    INFORMATIONAL,
    AttentionScheme,
    CachePlane,
    Endpoint,
    HandoffIdentity,
    PositionScheme,
    Ticket,
    WorkerContract,
    diff,
    prompt_digest,
)
from cache_transfer.framing import varint
from cache_transfer.wire import contract_to_proto, identity_to_proto, ticket_to_proto
from pdserve.conformance.reasons import PUSH_REASONS
from pdserve.conformance.streams import Cache, Draft, as_bytes, logits_dtype, make_draft, together
from pdserve.v1 import transfer_pb2 as pb

SECRET = bytes(range(32))
MAX_PAYLOAD_BYTES = 1 << 20


@dataclass
class Vector:
    """A handoff: what the receiver issued, and the messages that reach it."""

    name: str
    about: str
    contract: WorkerContract  # the receiver's
    ticket: Ticket
    identity: HandoffIdentity  # the expected one
    prompt_ids: tuple[int, ...]
    messages: list[bytes]
    expected: dict[str, Any]
    logits_only: bool = False

    @property
    def file(self) -> str:
        kind = "good" if self.expected["result"] == "accepted" else "hostile"
        return f"{kind}/{re.sub('[^a-z0-9]+', '-', self.name.lower()).strip('-')}.bin"

    def data(self) -> bytes:
        """Length-delimited: contract, ticket, identity, then every PushRequest."""
        heads: list[Message] = [
            contract_to_proto(self.contract),
            ticket_to_proto(self.ticket),
            identity_to_proto(self.identity),
        ]
        records = [head.SerializeToString(deterministic=True) for head in heads] + self.messages
        return b"".join(varint(len(record)) + record for record in records)

    def entry(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": self.file,
            "about": self.about,
            "prompt_ids": list(self.prompt_ids),
            "logits_only": self.logits_only,
            "max_payload_bytes": MAX_PAYLOAD_BYTES,
            "expected": {**_names(self), **self.expected},
        }


def make_contract(
    dtype: str = "fp32",
    *,
    layers: int = 2,
    k: tuple[int, int] = (2, 4),
    v: tuple[int, int] | None = None,
    vocab: int = 5,
    **changes: Any,
) -> WorkerContract:
    """`k` and `v` are (heads, head_dim) of the planes."""
    planes = (CachePlane("k", *k), CachePlane("v", *(v or k)))
    contract = WorkerContract(
        model_digest=hashlib.sha256(b"a model").digest(),
        positions=PositionScheme("rope", 10000.0, k[1]),
        attention=AttentionScheme(0.5),
        planes=(planes,) * layers,
        vocab_size=vocab,
        tokenizer_digest=b"",
        page_size=16,
        page_axis_order="hnd",
        device="cpu",
        kv_dtype=dtype,
        weight_dtype=dtype,
        activation_dtype="float64" if dtype == "float64" else "fp32",
    )
    return replace(contract, **changes)


def make_values(count: int, dtype: str, salt: int) -> npt.NDArray[np.uint8]:
    """`count` finite numbers in (-1, 1) and, first, those that a careless copy would change."""
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 65504.0, -1.5]
    state, values = salt * 2654435761 % 2**32, special[: min(count, len(special))] if salt == 0 else []
    while len(values) < count:
        state = (state * 1664525 + 1013904223) % 2**32
        values.append((state >> 8) / 2**23 - 1.0)
    with np.errstate(over="ignore"):
        return as_bytes(np.array(values), dtype)


def make_cache(contract: WorkerContract, tokens: int) -> Cache:
    cache: Cache = {}
    for layer, planes in enumerate(contract.planes):
        for plane in planes:
            flat = make_values(tokens * plane.heads * plane.head_dim, contract.kv_dtype, len(cache))
            cache[layer, plane.name] = flat.reshape(tokens, plane.heads, -1)
    return cache


def make_handoff(
    contract: WorkerContract,
    tokens: int,
    start: int = 0,
    *,
    attempt: int = 1,
    sends: WorkerContract | None = None,
    **options: Any,
) -> tuple[Draft, Cache, tuple[int, ...]]:
    """A right stream for a prompt of `tokens`, of which [0, start) are held already.

    Options: tenant, adapter, logits_only, tokens_per_frame, heads_per_frame, best (the id of the best score).
    """
    ids = tuple(7 * n % contract.vocab_size for n in range(tokens))
    adapter = options.pop("adapter", None)
    identity = HandoffIdentity(
        contract.digest(), adapter, options.pop("tenant", "tenant"), prompt_digest(ids), start, tokens
    )
    ticket = Ticket(
        b"handoff-id-16-by", attempt, b"incarnation-16-b", SECRET, 60000, start, (Endpoint("127.0.0.1:50051"),)
    )
    scores = np.linspace(-1.0, 1.0, contract.vocab_size)
    for token in options.pop("best", (2,)):
        scores[token] = 3.25
    cache = make_cache(sends or contract, tokens)
    data = as_bytes(scores, logits_dtype(contract))
    return make_draft(ticket, identity, sends or contract, cache, data, **options), cache, ids


def accepted(
    name: str, about: str, contract: WorkerContract, tokens: int, *args: Any, change: Any = None, **options: Any
) -> Vector:
    best, logits_only = options.get("best", (2,)), options.get("logits_only", False)
    in_message = options.pop("in_message", 0)
    draft, cache, ids = make_handoff(contract, tokens, *args, **options)
    if change is not None:
        change(draft)
    requests = draft.seal()
    start = draft.identity.end if logits_only else draft.identity.start
    return Vector(
        name,
        about,
        contract,
        draft.ticket,
        draft.identity,
        ids,
        _wire(together(requests, in_message) if in_message else requests),
        {
            "result": "accepted",
            "proof": requests[0].open.proof.hex(),
            "conversions": [
                d.code for d in diff(options.get("sends") or contract, contract) if d.kind != INFORMATIONAL
            ],
            "frame_digests": [request.frame.digest.hex() for request in requests[1:-2]],
            "logits_digest": requests[-2].logits.digest.hex(),
            "manifest_digest": requests[-1].commit.digest.hex(),
            "payload_bytes": sum(len(request.frame.payload) for request in requests[1:-2]),
            "cache_sha256": hashlib.sha256(b"".join(rows[start:].tobytes() for rows in cache.values())).hexdigest(),
            "first_token": min(best),
        },
        logits_only,
    )


def refused(
    name: str, contract: WorkerContract, ticket: Ticket, identity: HandoffIdentity, ids: tuple[int, ...],
    messages: list[bytes], reason: str, differences: Sequence[str] = (), **more: Any,
) -> Vector:  # fmt: skip
    status, _ = PUSH_REASONS[reason]
    expected = {"result": "refused", "reason": reason, "status": status.name, "differences": list(differences)}
    return Vector(name, f"refused with {reason}", contract, ticket, identity, ids, messages, expected, **more)


def _names(vector: Vector) -> dict[str, str]:
    return {
        "contract_digest": vector.contract.digest().hex(),
        "identity_digest": vector.identity.digest().hex(),
        "prompt_digest": prompt_digest(vector.prompt_ids).hex(),
    }


def _wire(requests: list[pb.PushRequest]) -> list[bytes]:
    return [request.SerializeToString(deterministic=True) for request in requests]
