"""What the health questions say, and that it is true: of a router without a pair, of workers that stand still.

`/readyz` and the gRPC health of the Gateway are one answer: can a request be served? The gRPC
health of a worker, and of the router as a whole, is about itself alone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from router.service import GATEWAY
from tests.e2e.stack import Stack, pair, pause, stack
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import prompt
from tests.router.support import LONG_CONTEXT, VOCAB, House, house, ids_of, model
from tests.router.test_dead_workers import process
from tests.router.worker_process import LONG_ENGINE

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8)
LEASE_S = 1.0


class Health:
    """Asks everybody."""

    def __init__(self, made: Stack | House) -> None:
        self._made = made
        self._http = httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=5.0)

    async def ready(self) -> bool:
        answer = await self._http.get("/readyz")
        assert (answer.status_code == 200) == answer.json()["ready"]
        assert answer.status_code in (200, 503)
        assert (await self._http.get("/healthz")).status_code == 200
        assert await serving(self._made.router.address), "the router itself is up all the time"
        return bool(answer.json()["ready"])

    async def until_ready(self, wanted: bool, within_s: float = WAIT_S) -> None:
        """Both ways to ask come to the same answer."""
        async with asyncio.timeout(within_s):
            while (await self.ready(), await serving(self._made.router.address, GATEWAY)) != (wanted, wanted):
                await pause(0.02)

    async def close(self) -> None:
        await self._http.aclose()


async def serving(address: str, service: str = "", timeout_s: float = 5.0) -> bool:
    """Raises AioRpcError when nobody answers."""
    async with channel(address) as link:
        stub: Any = health_pb2_grpc.HealthStub(link)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def asked(made: Stack | House) -> AsyncIterator[Health]:
    health = Health(made)
    try:
        yield health
    finally:
        await health.close()


async def test_a_pool_without_the_other_is_not_ready() -> None:
    async with stack() as made, asked(made) as health:
        await health.until_ready(False)
        decode = await made.add_decode()
        assert not await health.ready() and not await serving(made.router.address, GATEWAY)
        assert await serving(decode.address), "of itself it is healthy"
        with pytest.raises(Unavailable):
            await made.ask(prompt(9), GREEDY)
        prefill = await made.add_prefill()
        await health.until_ready(True)
        await made.ask(prompt(9), GREEDY)
        await made.remove(prefill)
        await health.until_ready(False)
        assert await serving(decode.address)


async def test_a_pair_that_does_not_fit_is_not_ready() -> None:
    async with stack() as made, asked(made) as health:
        await made.add_decode()
        await made.add_prefill(engine(seed=1))  # another model of the same shape
        assert not await health.ready() and not await serving(made.router.address, GATEWAY)
        await made.add_prefill()
        await health.until_ready(True)


async def test_a_long_prefill_makes_nobody_unhealthy() -> None:
    prefill = engine()
    async with pair(prefill) as made, asked(made) as health:
        await health.until_ready(True)
        with prefill.held():
            asking = asyncio.create_task(made.ask(prompt(400), GREEDY))
            async with asyncio.timeout(WAIT_S):
                await prefill.inside.wait()
            await pause(0.3)  # several looks of every watchdog
            assert await health.ready() and await serving(made.router.address, GATEWAY)
            for worker in made.workers:
                assert await serving(worker.address) and not worker.stalled
        await asking


@pytest.mark.slow
async def test_workers_that_stand_still_or_die_at_work() -> None:
    """Real processes: stopped one after the other, and the prefill worker killed in the middle of a transfer."""
    async with house(prefills=0, decodes=0) as made, asked(made) as health, AsyncExitStack() as stopped:
        prefill, decode = await asyncio.gather(
            stopped.enter_async_context(process(made, PREFILL, "p0", LEASE_S)),
            stopped.enter_async_context(process(made, DECODE, "d0", LEASE_S)),
        )
        await health.until_ready(True)
        addresses = {name: made.member(name).address for name in ("p0", "d0")}
        for name, worker in (("p0", prefill), ("d0", decode)):
            worker.send_signal(signal.SIGSTOP)
            try:
                await health.until_ready(False, LEASE_S + WAIT_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await serving(addresses[name], timeout_s=0.5)
                assert caught.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            finally:
                worker.send_signal(signal.SIGCONT)
            await health.until_ready(True)
            assert await serving(addresses[name])

        expected = await made.generate(prompt(40, vocab=VOCAB), max_tokens=4)
        asking = asyncio.create_task(made.generate(prompt(LONG_CONTEXT - 100, vocab=VOCAB), max_tokens=4))
        async with asyncio.timeout(WAIT_S):
            while not made.router.pool.load(made.member("d0")).pages_held:  # granted: the transfer has begun
                await pause(0.01)
        prefill.kill()
        with pytest.raises(Unavailable):
            async with asyncio.timeout(WAIT_S):
                await asking
        await health.until_ready(False)
        assert await serving(addresses["d0"])
        await made.add_prefill("p1", of=model(context=LONG_CONTEXT), engine=LONG_ENGINE)
        await health.until_ready(True)
        assert ids_of(await made.generate(prompt(40, vocab=VOCAB), max_tokens=4)) == ids_of(expected)
