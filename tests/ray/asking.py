"""What the tests on Ray share: a tiny model, requests with known answers, and looking at the pools from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from pdserve.client import AsyncClient, Finish, Worker
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.settings import RpcSettings
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from tests.engine.tiny import prompt, spec, tiny_model

ANYWHERE = RpcSettings(allow_plaintext=True)  # the networks are ours

Asked = tuple[tuple[int, ...], SamplingParams]


def write_model(path: Path, seed: int) -> Path:
    model = tiny_model(spec(context_limit=512), seed=seed)
    save_spec_checkpoint(path, model.spec, model.tensors)
    return path


def tables(model: Path) -> dict[str, Any]:
    """Two workers of each pool. In mode "ratio" a pool is meant to hold little, so that a test can fill it."""
    return {
        "model": {"path": str(model), "name": "tiny"},
        "engine": {"dtype": "fp32", "deterministic": True, "threads": 1, "pages": 1024, "page_size": 4},
        "prefill": {"chunk_tokens": 32},
        "registry": {"lease_s": 2.0, "heartbeat_s": 0.2},
        "router": {"port": 0, "http_port": 0},
        "pools": {"prefill": 2, "decode": 2, "ports": "28500-28699"},
        "scaling": {
            "mode": "ratio",
            "queued_tokens": 400,
            "wait_s": 60.0,
            "running": 4,
            "window_s": 0.5,
            "up_s": 1.0,
            "cooldown_s": 6.0,
        },
    }


def requests(count: int, tokens: int) -> list[Asked]:
    """Mixed lengths, greedy and sampled with penalties."""
    return [
        (
            prompt(5 + 11 * n, seed=n),
            SamplingParams(
                temperature=0.0 if n % 2 else 0.8,
                seed=n,
                frequency_penalty=0.3,
                max_tokens=tokens,
                ignore_eos=True,
            ),
        )
        for n in range(count)
    ]


def long_requests(count: int, seed: int) -> list[Asked]:
    """Prompts of many chunks, so that their prefill takes a while; no other seed shares a prefix with them."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return [(prompt(400 + n, seed=seed + n), params) for n in range(count)]


async def ask(client: AsyncClient, ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    done = await client.complete(token_ids=ids, sampling=params, timeout_s=60.0)
    assert isinstance(done.finish, Finish)
    return done.ids


def expected(baseline: LocalRunner, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
    outputs = baseline.generate_batch([ids for ids, _ in asked], [params for _, params in asked])
    return [output.ids for output in outputs]


async def settled(
    client: AsyncClient, workers: int, within_s: float = 60.0, rpc: RpcSettings = ANYWHERE
) -> list[Worker]:
    """The ready workers, once there are as many as asked for and none of them holds a page."""
    async with asyncio.timeout(within_s):
        while True:
            ready = [w for w in (await client.status()).workers if w.state == "ready"]
            if len(ready) == workers and all([await held_pages(w, rpc) == 0 for w in ready]):
                return ready
            await asyncio.sleep(0.1)  # Ray and the registry are watched from outside: there is nothing to await


async def held_pages(worker: Worker, rpc: RpcSettings = ANYWHERE) -> int | None:
    """None: it does not answer, as a killed one whose lease has not ended yet."""
    async with channel(worker.addresses[0], rpc) as to_worker:
        try:
            accounts = await worker_pb2_grpc.WorkerStub(to_worker).Accounts(worker_pb2.AccountsRequest(), timeout=2.0)
        except grpc.RpcError:
            return None
    assert accounts.intact, accounts.fault
    return int(accounts.pages_held)


def by_role(workers: Sequence[Worker]) -> tuple[int, int]:
    """(prefill, decode)."""
    roles = [worker.role for worker in workers]
    return roles.count("prefill"), roles.count("decode")
