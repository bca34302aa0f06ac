"""Records for the registry's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cache_transfer.contract import AttentionScheme, CachePlane, Endpoint, PositionScheme, WorkerContract
from pdserve.registry.records import DECODE, READY, Load, WorkerRecord

CONTRACT = WorkerContract(
    model_digest=b"m" * 32,
    positions=PositionScheme("rope", 1e5, 64, "llama3", (("factor", 8.0), ("low_freq_factor", 1.0)), 8192, False, True),
    attention=AttentionScheme(0.125, 50.0, (0, 4096)),
    planes=((CachePlane("k", 3, 64), CachePlane("v", 3, 64)), (CachePlane("k", 3, 64), CachePlane("v", 3, 32))),
    vocab_size=49152,
    tokenizer_digest=b"t" * 32,
    page_size=16,
    page_axis_order="hnd",
    device="cpu",
    kv_dtype="bf16",
    weight_dtype="bf16",
    activation_dtype="fp32",
    context_limit=2048,
    info={"torch": "2"},
)
FULL_LOAD = Load(1, 2, 3, 4, 5, 6, 7, 8.5, 2**40)
FIRST_BOOT = b"1" * 16
SECOND_BOOT = b"2" * 16


def record(worker_id: str = "decode-a", **changes: Any) -> WorkerRecord:
    """A decode worker with no field left at its default."""
    base = WorkerRecord(
        worker_id=worker_id,
        role=DECODE,
        incarnation=FIRST_BOOT,
        state=READY,
        model="tiny",
        endpoints=(Endpoint("127.0.0.1:1001"), Endpoint("127.0.0.1:1002", "grpc", "name", 1, 2, 1, 3)),
        transfer=(Endpoint("127.0.0.1:1003"),),
        contract=CONTRACT,
        load=FULL_LOAD,
        lease_s=20.0,
    )
    return replace(base, **changes)
