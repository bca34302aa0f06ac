"""Models and status as plain values, from a live gateway."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from cache_transfer.contract import diff
from pdserve.client import AsyncClient, Client, Contract, Model, Pair, Status, Worker, WorkerLoad
from pdserve.registry.wire import status_to_proto
from pdserve.rpc.status import difference_to_proto
from pdserve.v1 import gateway_pb2 as pb
from tests.registry.records import CONTRACT, record
from tests.rpc.gateway import ScriptedGateway, serving

MODEL = Model("tiny", 2048, 49152, b"m" * 32, True, False, 1_700_000_000)
WORKER = Worker(
    worker_id="decode-a",
    role="decode",
    state="ready",
    model="tiny",
    addresses=("127.0.0.1:1001", "127.0.0.1:1002"),
    contract=Contract(
        version=1,
        digest=CONTRACT.digest(),
        model_digest=b"m" * 32,
        tokenizer_digest=b"t" * 32,
        layers=2,
        vocab_size=49152,
        context_limit=2048,
        positions="rope",
        page_size=16,
        page_axis_order="hnd",
        device="cpu",
        kv_dtype="bf16",
        weight_dtype="bf16",
        activation_dtype="fp32",
        info={"torch": "2"},
    ),
    load=WorkerLoad(1, 2, 3, 4, 5, 6, 7, 8.5, 2**40),
    lease_left_s=2.5,
)


async def models(request: Any, context: Any) -> pb.ListModelsResponse:
    info = pb.ModelInfo(
        name="tiny",
        context_limit=2048,
        vocab_size=49152,
        model_digest=b"m" * 32,
        has_tokenizer=True,
        created_s=1_700_000_000,
    )
    return pb.ListModelsResponse(models=[info])


async def status(request: Any, context: Any) -> pb.StatusResponse:
    differences = diff(CONTRACT, replace(CONTRACT, vocab_size=1, page_size=8))
    return pb.StatusResponse(
        workers=[status_to_proto(record(), 2.5)],
        pairs=[
            pb.Pair(
                prefill_worker="prefill-a",
                decode_worker="decode-a",
                fits=False,
                differences=[difference_to_proto(d) for d in differences],
            )
        ],
        registry="memory",
        registry_warning="unreachable",
        active_requests=3,
        version="0.1.0",
    )


async def test_models_and_status_are_plain_values() -> None:
    async with serving(ScriptedGateway(models=models, status=status)) as server:
        async with AsyncClient(server.address) as client:
            seen = [(await client.models(), await client.status())]

        def ask() -> tuple[tuple[Model, ...], Status]:
            with Client(server.address) as client:
                return client.models(), client.status()

        seen.append(await asyncio.to_thread(ask))
    for got_models, got in seen:
        assert got_models == (MODEL,)
        assert got.workers == (WORKER,)
        (pair,) = got.pairs
        assert pair == Pair("prefill-a", "decode-a", False, pair.differences)
        assert [(d.code, d.left, d.right, d.kind) for d in pair.differences] == [
            ("VOCAB_SIZE", "49152", "1", "must_equal"),
            ("PAGE_SIZE", "16", "8", "convertible"),
        ]
        assert (got.registry, got.registry_warning, got.active_requests, got.version) == (
            "memory",
            "unreachable",
            3,
            "0.1.0",
        )
