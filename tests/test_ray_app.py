"""Two replicas of each pool on a real Ray: equal to one process, and what a death costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence

import grpc
import psutil
import pytest
from ray import serve

from pdserve.cli.deployment import Deployment
from pdserve.client import AsyncClient, Finish, Tokens, Worker
from pdserve.config import Config, load_config
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.errors import ConfigError
from pdserve.local import LocalRunner
from pdserve.ray_app import application, build, pools
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from tests.engine.tiny import prompt, spec, tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    # Ray's driver leaves its sockets and subprocess handles to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

STREAMS = 16
SETTLE_S = 10.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("model") / "tiny.pdmodel"
    model = tiny_model(spec(context_limit=512))
    save_spec_checkpoint(path, model.spec, model.tensors)
    return load_config(
        None,
        {
            "model": {"path": str(path)},
            "engine": {"dtype": "fp32", "deterministic": True, "threads": 1, "pages": 1024, "page_size": 4},
            "prefill": {"chunk_tokens": 32},
            "registry": {"lease_s": 2.0, "heartbeat_s": 0.2},
            "router": {"port": 0, "http_port": 0},
            "pools": {"prefill": 2, "decode": 2},
        },
    )


@pytest.fixture(scope="module")
def deployment(config: Config) -> Iterator[Deployment]:
    """Leaves no process behind; that is asserted at the end."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with Deployment(config, None, lambda text: None) as running:
        yield running
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=SETTLE_S)
    assert not alive, f"left running: {alive}"


@pytest.fixture(scope="module")
def baseline(config: Config) -> LocalRunner:
    return LocalRunner(Engine(load_model(config.model.path, "fp32"), config.decode.engine))


def requests(count: int, tokens: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
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


async def ask(client: AsyncClient, ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    done = await client.complete(token_ids=ids, sampling=params, timeout_s=60.0)
    assert isinstance(done.finish, Finish)
    return done.ids


def expected(baseline: LocalRunner, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[tuple[int, ...]]:
    outputs = baseline.generate_batch([ids for ids, _ in asked], [params for _, params in asked])
    return [output.ids for output in outputs]


async def settled(client: AsyncClient, workers: int) -> list[Worker]:
    """The ready workers, once there are as many as asked for and none of them holds a page."""

    async def look() -> list[Worker]:
        while True:
            ready = [w for w in (await client.status()).workers if w.state == "ready"]
            if len(ready) == workers and all([await held_pages(w) == 0 for w in ready]):
                return ready
            await asyncio.sleep(0.1)  # Ray and the registry are watched from outside: there is nothing to await

    return await asyncio.wait_for(look(), 60.0)


async def held_pages(worker: Worker) -> int | None:
    """None: it does not answer, as a killed one whose lease has not ended yet."""
    async with channel(worker.addresses[0]) as to_worker:
        try:
            accounts = await worker_pb2_grpc.WorkerStub(to_worker).Accounts(worker_pb2.AccountsRequest(), timeout=2.0)
        except grpc.RpcError:
            return None
    assert accounts.intact, accounts.fault
    return int(accounts.pages_held)


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


async def busy(*workers: Worker) -> None:
    """Returns once one of the workers holds pages, so that there is work in progress to hit."""

    async def look() -> None:
        while not any([await held_pages(worker) for worker in workers]):
            await asyncio.sleep(0.005)  # another process is watched from outside

    await asyncio.wait_for(look(), 60.0)


def long_requests(count: int, seed: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts of many chunks, so that their prefill takes a while; no other seed shares a prefix with them."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return [(prompt(400 + n, seed=seed + n), params) for n in range(count)]


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
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 60.0)
        later = [asyncio.create_task(ask(client, ids, params)) for ids, params in waiting]
        await busy(*(worker for worker in workers if worker.role == "prefill"))
        os.kill(pid, signal.SIGKILL)
        ended, got = await asyncio.gather(*running), await asyncio.gather(*later)
        assert list(got) == expected(baseline, waiting), "no first token yet: they succeed elsewhere"
        assert list(ended) == expected(baseline, streams), "those with tokens go on elsewhere"
        await settled(client, 4)
        assert await ask(client, *waiting[0]) == got[0]


async def test_serve_deploy_builds_one_application_per_pool(config: Config) -> None:
    for pool in pools(config):
        built = build({"pool": pool.role})
        deployment = built._bound_deployment
        assert deployment.name == pool.role
    with pytest.raises(ConfigError, match="no pool"):
        build({"pool": "middle"})


async def test_resources_of_a_replica_are_what_the_configuration_says() -> None:
    config = load_config(None, {"pools": {"prefill": 3, "prefill_cpus": 2.5, "decode_gpus": 1, "decode_cpus": 4}})
    options = {}
    for pool in pools(config):
        deployment = application(config, pool)._bound_deployment
        options[pool.role] = (deployment.num_replicas, deployment.ray_actor_options)
    assert options["prefill"] == (3, {"num_cpus": 2.5, "num_gpus": 0.0})
    assert options["decode"] == (1, {"num_cpus": 4.0, "num_gpus": 1.0})
