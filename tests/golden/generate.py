"""Writes the golden vectors of docs/vectors: `python -m tests.golden.generate [--check]`.

Each vector is one handoff in a file, and what a receiver must find in it. Nothing random goes
in, so a run gives the same bytes anywhere. `--check` writes nothing and fails on a difference.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
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
from pdserve.conformance.catalogue import hostile_streams
from pdserve.conformance.reasons import PUSH_REASONS
from pdserve.conformance.streams import Cache, Draft, as_bytes, logits_dtype, make_draft
from pdserve.v1 import transfer_pb2 as pb

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
SECRET = bytes(range(32))
MAX_PAYLOAD_BYTES = 1 << 20
TOO_LARGE_TO_KEEP = ("a payload of 2 MiB",)


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
        _wire(requests),
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


def worked_example() -> Vector:
    """Small enough for docs/protocol.md to show every byte of it."""
    contract = make_contract(layers=1, k=(1, 2), vocab=2)
    about = "what docs/protocol.md works through"
    return accepted("worked example", about, contract, 2, tokens_per_frame=2, best=(1,))


def good() -> Iterator[Vector]:
    yield worked_example()
    yield accepted(
        "fp32 grouped heads", "two layers, two KV heads, one frame per plane", make_contract(), 5, tokens_per_frame=5
    )
    bf16 = make_contract(
        "bf16",
        layers=1,
        k=(1, 8),
        positions=PositionScheme(
            "rope", 500000.0, 8, "llama3", (("factor", 8.0), ("low_freq_factor", 1.0)), 8192, interleaved=True
        ),
        tokenizer_digest=hashlib.sha256(b"a tokenizer").digest(),
    )
    yield accepted("bf16", "bf16 payload; scaled positions; a tokenizer", bf16, 3)
    windows = make_contract(layers=3, attention=AttentionScheme(0.35, 30.0, (0, 6, 0)))
    yield accepted(
        "prefix held", "tokens 4 to 10 of 11 travel, layers in falling order, heads one by one, three tokens a frame",
        windows, 11, 4, tokens_per_frame=3, heads_per_frame=1, change=_backwards,
    )  # fmt: skip
    yield accepted("logits only", "no cache travels: one token was asked for", make_contract(), 6, logits_only=True)
    yield accepted("float64", "float64 payload and logits", make_contract("float64", layers=1, k=(1, 2)), 4)
    yield accepted(
        "fp16 long frame",
        "a payload of several hash chunks",
        make_contract("fp16", layers=1, k=(2, 32)),
        40,
        tokens_per_frame=40,
    )
    yield accepted(
        "adapter and unequal planes", "an adapter, a tenant beyond ASCII, V narrower than K, the second attempt",
        make_contract(layers=1, k=(2, 4), v=(1, 2)), 5, attempt=2, adapter=bytes(range(32)), tenant="Käufer 東京",
    )  # fmt: skip
    other = make_contract(page_size=7, page_axis_order="nhd", device="cuda", info={"torch": "3.0"}, context_limit=99)
    yield accepted(
        "converted", "page size, axis order and device differ and are converted", make_contract(), 5, sends=other
    )
    lossy = make_contract("bf16", allow_lossy=True)
    yield accepted(
        "converted with loss", "both sides allow it: fp32 travels, the receiver keeps bf16",
        lossy, 4, sends=replace(lossy, kv_dtype="fp32", weight_dtype="fp32"),
    )  # fmt: skip
    yield accepted("one token", "the shortest prompt", make_contract(), 1)
    yield accepted("tie", "two best scores: the lowest id wins", make_contract(), 3, best=(3, 1))
    yield accepted(
        "wide header integers",
        "header keys in reverse, every integer in nine bytes",
        make_contract(layers=1),
        4,
        change=_wide,
    )


def hostile() -> Iterator[Vector]:
    contract = make_contract(layers=1, k=(1, 2), vocab=4)
    for case in hostile_streams():
        if case.name in TOO_LARGE_TO_KEEP:
            continue
        draft, _, ids = make_handoff(contract, 4)
        issued, identity = draft.ticket, draft.identity
        yield refused(case.name, contract, issued, identity, ids, case.make(draft), case.reasons[0], case.differences)
    yield from _hostile_beyond()


def refused(
    name: str, contract: WorkerContract, ticket: Ticket, identity: HandoffIdentity, ids: tuple[int, ...],
    messages: list[bytes], reason: str, differences: Sequence[str] = (), **more: Any,
) -> Vector:  # fmt: skip
    status, _ = PUSH_REASONS[reason]
    expected = {"result": "refused", "reason": reason, "status": status.name, "differences": list(differences)}
    return Vector(name, f"refused with {reason}", contract, ticket, identity, ids, messages, expected, **more)


def _hostile_beyond() -> Iterator[Vector]:
    """What needs a ticket or grant of its own."""
    contract = make_contract(layers=1, k=(1, 2), vocab=4)
    draft, _, ids = make_handoff(contract, 6, 2)
    whole, _, _ = make_handoff(contract, 6, 0)
    frames = draft.messages()
    yield refused(
        "tokens that are held already", contract, draft.ticket, draft.identity, ids,
        [frames[0], *whole.messages()[1:]], "FRAME_TOKENS",
    )  # fmt: skip
    draft, _, ids = make_handoff(contract, 4)
    only, _, _ = make_handoff(contract, 4, logits_only=True)
    yield refused(
        "a frame where only logits travel", contract, only.ticket, only.identity, ids,
        [only.messages()[0], *draft.messages()[1:]], "FRAME_TOKENS", logits_only=True,
    )  # fmt: skip
    second, _, _ = make_handoff(contract, 4, attempt=2)
    yield refused(
        "the ticket of the attempt before", contract, second.ticket, second.identity, ids,
        draft.messages(), "ATTEMPT_STALE",
    )  # fmt: skip
    for code, other in (
        ("MODEL_DIGEST", replace(contract, model_digest=hashlib.sha256(b"another model").digest())),
        ("POSITION_SCHEME.theta", replace(contract, positions=replace(contract.positions, theta=10000.5))),
        ("ATTENTION.scale", replace(contract, attention=AttentionScheme(0.25))),
        ("PLANES[0].v.head_dim", replace(contract, planes=((CachePlane("k", 1, 2), CachePlane("v", 1, 4)),))),
        ("TOKENIZER_DIGEST", replace(contract, tokenizer_digest=bytes(32))),
        ("CONTRACT_VERSION", replace(contract, version=2)),
        ("KV_DTYPE", replace(contract, kv_dtype="bf16", allow_lossy=True)),
        ("WEIGHT_DTYPE", replace(contract, weight_dtype="bf16")),
    ):
        draft, _, ids = make_handoff(contract, 4, sends=other)
        yield refused(
            f"a contract with another {code}", contract, draft.ticket, draft.identity, ids,
            draft.messages(), "CONTRACT_MISMATCH", (code,),
        )  # fmt: skip


def _backwards(draft: Draft) -> None:
    """Layers last to first; within a layer as before."""
    draft.frames.sort(key=lambda frame: -frame.header["layer"])  # type: ignore[call-overload]
    draft.renumber()


def _wide(draft: Draft) -> None:
    """The same headers in the largest encoding that msgpack has."""
    for frame in draft.frames:
        assert isinstance(frame.header, dict)
        pairs = list(frame.header.items())[::-1]
        frame.header = b"\x86" + b"".join(msgpack.packb(key) + _wide_value(value) for key, value in pairs)


def _wide_value(value: Any) -> bytes:
    if isinstance(value, int):
        return b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(_wide_value, value))
    text: bytes = value.encode()
    return b"\xdb" + struct.pack(">I", len(text)) + text


def _names(vector: Vector) -> dict[str, str]:
    return {
        "contract_digest": vector.contract.digest().hex(),
        "identity_digest": vector.identity.digest().hex(),
        "prompt_digest": prompt_digest(vector.prompt_ids).hex(),
    }


def _wire(requests: list[pb.PushRequest]) -> list[bytes]:
    return [request.SerializeToString(deterministic=True) for request in requests]


def files() -> dict[str, bytes]:
    """Every file of the folder that this program writes."""
    vectors = [*good(), *hostile()]
    index = {"format": 1, "vectors": [vector.entry() for vector in vectors]}
    made = {vector.file: vector.data() for vector in vectors}
    assert len(made) == len(vectors), "two vectors of one name"
    return {**made, "index.json": (json.dumps(index, indent=1, ensure_ascii=False) + "\n").encode()}


def main(check: bool) -> int:
    wrong = [name for name, data in files().items() if not _same(FOLDER / name, data)]
    if check:
        sys.stdout.write("\n".join(wrong or ["the vectors are what this program writes"]) + "\n")
        return 1 if wrong else 0
    for name, data in files().items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_bytes(data)
    sys.stdout.write(f"{len(wrong)} files changed\n")
    return 0


def _same(path: Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() == data


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
