"""Writes the golden vectors of docs/vectors: `python -m tests.golden.generate [--check]`.

Each vector is one handoff in a file, and what a receiver must find in it. A run gives the same
bytes anywhere. `--check` writes nothing and fails on a difference.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cache_transfer.contract import (
    AttentionScheme,
    CachePlane,
    PositionScheme,
)
from pdserve.conformance.catalogue import hostile_streams
from pdserve.conformance.good import widen
from pdserve.conformance.streams import Draft
from tests.golden.vectors import Vector, accepted, make_contract, make_handoff, refused

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
TOO_LARGE_TO_KEEP = ("a payload of 2 MiB",)


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
    windows = make_contract(
        layers=3,
        attention=AttentionScheme(0.35, 30.0, (0, 6, 0)),
        layer_positions=(PositionScheme("rope", 1e6, 4), PositionScheme("rope", 1e4, 2), PositionScheme("none")),
    )
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
    pair = make_contract().planes[0]
    yield accepted(
        "layers of unequal shapes", "one caches nothing, one a single plane of another name and shape",
        make_contract(planes=(pair, (), (CachePlane("conv", 1, 6),))), 5,
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
    yield accepted(
        "frames together", "three frames in each message", make_contract(), 5, tokens_per_frame=2, in_message=3
    )
    yield accepted("one token", "the shortest prompt", make_contract(), 1)
    yield accepted("tie", "two best scores: the lowest id wins", make_contract(), 3, best=(3, 1))
    yield accepted(
        "wide header integers",
        "header keys in reverse, every integer in nine bytes",
        make_contract(layers=1),
        4,
        change=widen,
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
        ("LAYER_POSITIONS[0]", replace(contract, layer_positions=(PositionScheme("none"),))),
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
