"""A sender whose contract was compared and found fitting, and whose frames are then of another one.

Layers, heads, widths, dtype and the order of K and V: refused, or without effect on what is kept.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_transfer.contract import CachePlane, WorkerContract
from pdserve.errors import DataLoss, InvalidRequest, PdserveError
from tests.cache_transfer.by_hand import make_stream, push_bytes
from tests.cache_transfer.changes import TOKENS, wire
from tests.cache_transfer.support import Pair, check_same, make_contract, make_pair, random_cache

BASE = make_contract(heads=4, page_size=4)  # as many heads as tokens in a page: no shape check sees a swapped axis


def planes(*each: tuple[CachePlane, ...]) -> WorkerContract:
    return replace(BASE, planes=each)


K, V = BASE.planes[0]
ROW = BASE.planes[0]
OTHERS: list[tuple[str, WorkerContract, type[PdserveError], str]] = [
    ("one layer more", planes(ROW, ROW, ROW, ROW), InvalidRequest, "FRAME_PLANE"),
    ("one layer less", planes(ROW, ROW), DataLoss, "FRAMES_MISSING"),
    ("more heads", planes(*[(replace(K, heads=8), replace(V, heads=8))] * 3), InvalidRequest, "FRAME_HEADS"),
    ("fewer heads", planes(*[(replace(K, heads=2), replace(V, heads=2))] * 3), DataLoss, "FRAMES_MISSING"),
    ("wider heads", planes(*[(replace(K, head_dim=8), replace(V, head_dim=8))] * 3), InvalidRequest, "FRAME_SIZE"),
    ("half the heads, twice as wide", planes(*[(replace(K, heads=2, head_dim=8), replace(V, heads=2, head_dim=8))] * 3),
     InvalidRequest, "FRAME_SIZE"),
    ("K alone", planes((K,), (K,), (K,)), DataLoss, "FRAMES_MISSING"),
    ("another name", planes((K, replace(V, name="w")), ROW, ROW), InvalidRequest, "FRAME_PLANE"),
    ("another dtype", replace(BASE, kv_dtype="bf16"), InvalidRequest, "FRAME_DTYPE"),
    ("another dtype of the same size", replace(make_contract(heads=4, page_size=4, dtype="fp16"), kv_dtype="bf16"),
     InvalidRequest, "FRAME_DTYPE"),
]  # fmt: skip


def stream_of(pair: Pair, frames: WorkerContract) -> list[bytes]:
    """Opened with the pair's own contract; frames, logits and commit as `frames` has them."""
    ticket, identity = pair.issue(TOKENS)
    requests = make_stream(ticket, identity, frames, random_cache(frames, TOKENS))
    requests[0] = make_stream(ticket, identity, pair.sends, random_cache(pair.sends, TOKENS))[0]
    return wire(requests)


@pytest.mark.parametrize(("name", "frames", "error", "reason"), OTHERS, ids=[case[0] for case in OTHERS])
async def test_frames_of_another_contract_than_the_one_compared(
    name: str, frames: WorkerContract, error: type[PdserveError], reason: str
) -> None:
    sends = make_contract(heads=4, page_size=4, dtype="fp16") if "same size" in name else BASE
    async with make_pair("grpc", sends=sends) as pair:
        with pytest.raises(error) as caught:
            await push_bytes(pair, stream_of(pair, frames))
        assert (type(caught.value), caught.value.reason) == (error, reason)
        assert pair.host.done == []
        await pair.check_next_handoff_works()


@pytest.mark.parametrize(
    "frames",
    [
        planes((V, K), ROW, (V, K)),
        replace(BASE, page_size=64),
        replace(BASE, page_axis_order="nhd"),
        replace(BASE, page_size=1, device="cuda"),
    ],
    ids=["V before K", "page size", "axis order", "page size and device"],
)
async def test_what_a_frame_does_not_depend_on_may_differ_from_request_to_request(frames: WorkerContract) -> None:
    """Frames name their plane and tokens, so the order of planes and the sender's pages change nothing."""
    async with make_pair("grpc", sends=BASE) as pair:
        cache = random_cache(BASE, TOKENS)
        ticket, identity = pair.issue(TOKENS)
        requests = make_stream(ticket, identity, frames, cache)
        requests[0] = make_stream(ticket, identity, pair.sends, cache)[0]
        await push_bytes(pair, wire(requests))
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(TOKENS), cache)
        await pair.check_next_handoff_works()
