"""Two replicas of each pool on a real Ray: equal to one process, and what a death costs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Sequence

import httpx
import pytest
from ray import serve

from pdserve.cli.deployment import Deployment
from pdserve.client import AsyncClient, Tokens, Worker
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from tests.ray.asking import ask, expected, held_pages, long_requests, requests, settled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    # Ray's driver leaves its sockets and subprocess handles to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

STREAMS = 16


async def replica_pid(application: str) -> tuple[str, int]:
    """Worker id and process id of one replica of a pool."""
    worker, pid = await serve.get_app_handle(application).describe.remote()
    return worker, pid


async def test_sixteen_streams_equal_one_process(deployment: Deployment, baseline: LocalRunner) -> None:
    asked = requests(STREAMS, tokens=24)
    async with AsyncClient(deployment.gateway) as client:
        got = await asyncio.gather(*(ask(client, ids, params) for ids, params in asked))
        workers = await settled(client, 4)
    assert list(got) == expected(baseline, asked)
    assert sorted(w.role for w in workers) == ["decode", "decode", "prefill", "prefill"]
    assert all(w.load.steps > 0 for w in workers), "every replica took part"


async def test_the_router_tells_prometheus_where_the_replicas_are(deployment: Deployment) -> None:
    async with httpx.AsyncClient() as http:
        found = (await http.get(f"http://{deployment.http}/metrics/targets")).json()
        assert len({target["labels"]["worker"] for target in found}) == 4
        pages = [(await http.get(f"http://{target['targets'][0]}/metrics")).text for target in found]
    steps = [float(value) for page in pages for value in re.findall(r"^pdserve_engine_steps_total.* (.+)$", page, re.M)]
    assert len(steps) == 4 and all(steps), "each of its own process, after the streams above"


async def busy(*workers: Worker) -> None:
    """Returns once one of the workers holds pages, so that there is work in progress to hit."""

    async def look() -> None:
        while not any([await held_pages(worker) for worker in workers]):
            await asyncio.sleep(0.005)  # another process is watched from outside

    async with asyncio.timeout(60.0):
        await look()


async def test_a_prefill_replica_killed_at_work_costs_no_request(deployment: Deployment, baseline: LocalRunner) -> None:
    asked = long_requests(STREAMS, seed=100)
    async with AsyncClient(deployment.gateway) as client:
        workers = {worker.worker_id: worker for worker in await settled(client, 4)}
        victim, pid = await replica_pid("pdserve-prefill")
        running = [asyncio.create_task(ask(client, ids, params)) for ids, params in asked]
        await busy(workers[victim])
        os.kill(pid, signal.SIGKILL)
        got = await asyncio.gather(*running)
        assert list(got) == expected(baseline, asked)
        after = await settled(client, 4)
    assert victim not in {w.worker_id for w in after}, "Ray replaced it and the lease of the old one has ended"


async def follow(
    client: AsyncClient, ids: Sequence[int], params: SamplingParams, begun: asyncio.Event
) -> tuple[int, ...]:
    """The ids of one stream."""
    got: list[int] = []
    async for event in client.generate(token_ids=ids, sampling=params, timeout_s=120.0):
        if isinstance(event, Tokens):
            got += event.ids
            begun.set()
    return tuple(got)


async def test_a_killed_decode_replica_costs_no_request(deployment: Deployment, baseline: LocalRunner) -> None:
    streams, waiting = requests(STREAMS // 2, tokens=160), long_requests(STREAMS // 2, seed=200)
    async with AsyncClient(deployment.gateway) as client:
        workers = await settled(client, 4)
        _, pid = await replica_pid("pdserve-decode")
        begun = [asyncio.Event() for _ in streams]
        running = [
            asyncio.create_task(follow(client, ids, params, event))
            for (ids, params), event in zip(streams, begun, strict=True)
        ]
        async with asyncio.timeout(60.0):
            await asyncio.gather(*(event.wait() for event in begun))
        later = [asyncio.create_task(ask(client, ids, params)) for ids, params in waiting]
        await busy(*(worker for worker in workers if worker.role == "prefill"))
        os.kill(pid, signal.SIGKILL)
        ended, got = await asyncio.gather(*running), await asyncio.gather(*later)
        assert list(got) == expected(baseline, waiting), "no first token yet: they succeed elsewhere"
        assert list(ended) == expected(baseline, streams), "those with tokens go on elsewhere"
        await settled(client, 4)
        assert await ask(client, *waiting[0]) == got[0]
