"""The side `worker:HOST:PORT`: a running prefill worker shows what its own engine computes."""

from __future__ import annotations

import asyncio

import grpc
import torch
from torch import Tensor

from cache_transfer.contract import WorkerContract
from cache_transfer.wire import contract_from_proto
from pdserve.engine.observe import Broken, Observed, Rows
from pdserve.errors import ConfigError, DataLoss
from pdserve.rpc.channel import channel
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import from_rpc_error
from pdserve.tokenizer import Bundle
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.verify.observing import Prompts, Run, Shape, described
from pdserve.verify.sides import Side
from pdserve.worker.trace import TracedRun, read_trace
from router.channels import WorkerChannels
from router.wire import fetch_bundle

COLUMNS = 256  # of each row
TRACE_S = 120.0  # for one prompt


def contract_of(side: Side, rpc: RpcSettings) -> WorkerContract:
    """What the worker promises. Raises what the call raises."""
    return asyncio.run(_described(side.address, rpc))


def bundle_of(side: Side, contract: WorkerContract, rpc: RpcSettings) -> Bundle | None:
    """The worker's tokenizer; None: it has none."""
    if not contract.tokenizer_digest:
        return None
    return asyncio.run(_bundle(side.address, contract.tokenizer_digest, rpc))


def run_worker(side: Side, prompts: Prompts, rpc: RpcSettings) -> Run:
    """Every prompt through the worker's engine, no tokens generated.

    Raises Refused where `allow_trace` is off, Unavailable, and what else the worker answers.
    """
    return asyncio.run(_run(side, prompts, rpc))


def shape_of_contract(contract: WorkerContract) -> Shape:
    return Shape(contract.planes, contract.vocab_size)


async def _run(side: Side, prompts: Prompts, rpc: RpcSettings) -> Run:
    contract = await _described(side.address, rpc)
    observed: list[Observed] = []
    broken: list[Broken] = []
    async with channel(side.address, rpc) as to_worker:
        stub = worker_pb2_grpc.WorkerStub(to_worker)
        for prompt in prompts:
            request = worker_pb2.TraceRequest(token_ids=prompt, chunk_tokens=side.chunk_tokens, columns=COLUMNS)
            try:
                run = await read_trace(stub.Trace(request, timeout=TRACE_S))
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            seen, faults = _received(run, prompt, len(contract.planes))
            observed.append(seen)
            broken += faults
    return Run(
        side=side,
        shape=shape_of_contract(contract),
        observed=tuple(observed),
        contract=contract,
        broken=tuple({fault.check: fault for fault in reversed(broken)}.values()),
        record=described(side, contract),
    )


async def _described(address: str, rpc: RpcSettings) -> WorkerContract:
    async with channel(address, rpc) as to_worker:
        stub = worker_pb2_grpc.WorkerStub(to_worker)
        try:
            status = await stub.Describe(worker_pb2.DescribeRequest(), timeout=rpc.call_timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    contract = contract_from_proto(status.contract)
    if not any(contract.planes):
        raise ConfigError(f"{address} caches nothing", field="side", remedy="name a prefill worker")
    return contract


async def _bundle(address: str, digest: bytes, rpc: RpcSettings) -> Bundle:
    channels = WorkerChannels(rpc)
    try:
        bundle = Bundle.from_bytes(await fetch_bundle(channels, address, digest, rpc.call_timeout_s))
    finally:
        await channels.close()
    if bundle.digest() != digest:
        raise DataLoss(
            f"{address} sent another tokenizer than its contract names",
            reason="BUNDLE_DIGEST",
            field="tokenizer",
            remedy="run it again; if it stays so, restart that worker",
        )
    return bundle


def _received(run: TracedRun, ids: tuple[int, ...], layers: int) -> tuple[Observed, tuple[Broken, ...]]:
    """A run of `ids` as another process sent it. Raises DataLoss when its sizes do not fit the prompt."""
    found: list[dict[str, Rows]] = [{} for _ in range(layers)]
    logits: tuple[Tensor, ...] = ()
    for rows in run.rows:
        dtype = torch.float64 if rows.dtype == "float64" else torch.float32
        if rows.layer == layers and rows.tensor == "logits":
            logits = (torch.frombuffer(bytearray(rows.data), dtype=dtype),)
            continue
        data = torch.frombuffer(bytearray(rows.data), dtype=dtype).view(-1, rows.columns)
        if not 0 <= rows.layer < layers or not len(data) == len(rows.norms) == len(ids):
            raise _lost(f"{rows.tensor} of layer {rows.layer} is not of this prompt")
        found[rows.layer][rows.tensor] = Rows(rows.shape, data, torch.tensor(rows.norms, dtype=torch.float64))
    if not logits or len(run.positions) != len(ids) or len(run.cached) != layers:
        raise _lost("it is not of this prompt")
    broken = tuple(Broken(check, message) for check, message in run.broken)
    return Observed(ids, len(ids), run.positions, tuple(found), run.cached, logits), broken


def _lost(message: str) -> DataLoss:
    return DataLoss(message, reason="TRACE_BROKEN", field="trace", remedy="check that both ends run one version")
