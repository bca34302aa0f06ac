"""The whole service in one process, as an operator would wire it.

Router with its embedded registry, any number of prefill and decode workers, a client: all on
the test's event loop, and every byte between them over real loopback gRPC. Nothing is replaced;
watched.py says how a test sees inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.client import AsyncClient
from pdserve.client.events import Completion, Event, Tokens
from pdserve.engine.engine import Engine
from pdserve.local import LocalRunner
from pdserve.registry.records import Registry
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.settings import RpcSettings
from pdserve.tokenizer import Bundle
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from router.settings import RouterSettings
from tests.e2e.watched import WAIT_S, WatchedHost, engine
from tests.engine.tiny import tiny_engine

FREE_S = 2.0  # for pages to come back after a client has gone
MODEL = "tiny"
LEASE = RegistrySettings(lease_s=30.0, heartbeat_s=0.1, timeout_s=2.0)

Worker = PrefillWorker | DecodeWorker


@dataclass
class Answer:
    """What one process computes for a prompt."""

    ids: tuple[int, ...]
    logits: list[Tensor]  # raw, per step

    @property
    def first_logits(self) -> bytes:
        """As they would travel."""
        return bytes(self.logits[0].numpy().tobytes())


def alone(ids: Sequence[int], params: SamplingParams, *, chunk_tokens: int = 7, **model: Any) -> Answer:
    """The baseline: one process, one prompt, an engine of its own."""
    runner = LocalRunner(tiny_engine(**{"deterministic": True, "pages": 256, **model}), chunk_tokens=chunk_tokens)
    return alone_on(runner, ids, params)


def alone_on(runner: LocalRunner, ids: Sequence[int], params: SamplingParams) -> Answer:
    logits: list[Tensor] = []
    events = runner.generate(ids, params, observe=lambda number, index, row: logits.append(row.clone()))
    tokens = [token for event in events for token in getattr(event, "ids", ())]
    return Answer(tuple(tokens), logits)


@dataclass
class Stack:
    """A started router, its workers and a client of it."""

    router: Router
    client: AsyncClient
    channels: ChannelPool  # to the workers, for what a test asks them itself
    prefills: list[PrefillWorker] = field(default_factory=list)
    decodes: list[DecodeWorker] = field(default_factory=list)
    hosts: list[WatchedHost] = field(default_factory=list)  # one per decode worker

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    async def add_prefill(
        self,
        model: Engine | None = None,
        *,
        bundle: Bundle | None = None,
        through: Registry | None = None,
        announced: bool = True,
        **settings: Any,
    ) -> PrefillWorker:
        """Adds p0, p1, ...

        Args:
            through: its way to the registry; takes the place of the router's own.
            announced: whether it registers itself anywhere.
        """
        given = {"chunk_tokens": 16, "max_running": 4, **self._common("p", len(self.prefills)), **settings}
        told = (through or self.router.registry) if announced else None
        worker = PrefillWorker(model or engine(), bundle, PrefillSettings(**given), told)
        self.prefills.append(worker)
        await worker.start()
        await self.router.pool.refresh()
        return worker

    async def add_decode(
        self,
        model: Engine | None = None,
        *,
        bundle: Bundle | None = None,
        through: Registry | None = None,
        announced: bool = True,
        **settings: Any,
    ) -> DecodeWorker:
        """Adds d0, d1, ...; see `add_prefill`."""
        given = {**self._common("d", len(self.decodes)), **settings}
        told = (through or self.router.registry) if announced else None
        worker = DecodeWorker(model or engine(), bundle, DecodeSettings(**given), told)
        receiver = worker.pipeline.handoffs.receiver
        host = WatchedHost(receiver._host)
        receiver._host = host
        self.decodes.append(worker)
        self.hosts.append(host)
        await worker.start()
        await self.router.pool.refresh()
        return worker

    async def ask(self, ids: Sequence[int], params: SamplingParams, **options: Any) -> Completion:
        """One request through the client, with its record."""
        asked = {"want_record": True, "timeout_s": 60.0, **options}
        return await self.client.complete(token_ids=ids, sampling=params, **asked)

    def first_logits(self, completion: Completion) -> bytes:
        """What some decode worker received for this request."""
        assert completion.accepted is not None
        (found,) = [h.logits[i] for h in self.hosts if (i := completion.accepted.request_id) in h.logits]
        return found.data

    async def until(self, holds: Callable[[], bool], within_s: float = WAIT_S) -> None:
        """Looks at what is in this process, many times a second, until something holds."""
        async with asyncio.timeout(within_s):
            while not holds():
                await pause(0.005)

    async def check_free(self, within_s: float = WAIT_S) -> None:
        """Soon nothing is held anywhere; then every account is right."""
        try:
            async with asyncio.timeout(within_s):
                for worker in self.workers:
                    while (await self._accounts(worker)).holdings:
                        await pause(0.005)
                await self.until(lambda: not self.router.orchestrator.active and all(map(_idle, self.workers)))
        except TimeoutError:
            held = {w.worker_id: w.blocks.holdings() for w in self.workers}
            raise AssertionError(f"still held after {within_s:g} s: {held}") from None
        for worker in self.workers:
            accounts = await self._accounts(worker)
            assert accounts.intact and not accounts.pages_held and not accounts.holdings, accounts
            assert accounts.pages_free + accounts.pages_cached == accounts.pages_total, accounts
            assert not worker.broken.is_set()

    async def remove(self, worker: Worker) -> None:
        """Stops a worker and forgets it."""
        if isinstance(worker, PrefillWorker):
            self.prefills.remove(worker)
        else:
            del self.hosts[self.decodes.index(worker)]
            self.decodes.remove(worker)
        await worker.stop()
        await self.router.pool.refresh()

    async def _accounts(self, worker: Worker) -> worker_pb2.AccountsResponse:
        response = await self._stub(worker).Accounts(worker_pb2.AccountsRequest(), timeout=WAIT_S)
        assert isinstance(response, worker_pb2.AccountsResponse)
        return response

    def _stub(self, worker: Worker) -> Any:
        return worker_pb2_grpc.WorkerStub(self.channels.get(worker.address))

    @staticmethod
    def _common(letter: str, number: int) -> dict[str, Any]:
        return {"worker_id": f"{letter}{number}", "name": MODEL, "registry": LEASE, "reap_s": 0.05, "grace_s": 1.0}


async def pause(seconds: float) -> None:
    """Between two looks at something: looking all the time would take the CPU from those who work on it."""
    await asyncio.wait((asyncio.get_running_loop().create_future(),), timeout=seconds)


def _idle(worker: Worker) -> bool:
    """No request is here, and nothing of one is left behind."""
    if isinstance(worker, PrefillWorker):
        return worker.pipeline.scheduler.idle and not worker.pipeline.jobs
    handoffs = worker.pipeline.handoffs
    left = (*worker.pipeline.sequences, *worker.pipeline.scheduler.grants, *handoffs._sequences)
    return not left and not len(handoffs.book) and not handoffs.receiver.active


@asynccontextmanager
async def stack(
    *, caller: RpcSettings | None = None, operator: RpcSettings | None = None, **settings: Any
) -> AsyncIterator[Stack]:
    """A router without workers. At the end nothing may be held; then all of it stops.

    Args:
        caller: how the client connects.
        operator: how the accounts of workers are asked for.
    """
    torch.set_num_threads(1)
    router = Router(RouterSettings(**{"port": 0, "http_port": 0, "refresh_s": 0.05, "registry": LEASE, **settings}))
    await router.start()
    async with AsyncClient(router.address, caller) as client:
        made = Stack(router, client, ChannelPool(operator))
        try:
            yield made
            await made.check_free()
        finally:
            for worker in made.workers:
                await worker.stop()
            await router.stop()
            await made.channels.close()


@asynccontextmanager
async def pair(prefill: Engine | None = None, decode: Engine | None = None, **settings: Any) -> AsyncIterator[Stack]:
    """A router, one prefill and one decode worker without a tokenizer."""
    async with stack(**settings) as made:
        await made.add_prefill(prefill)
        await made.add_decode(decode)
        yield made


async def read_tokens(events: AsyncIterator[Event], count: int) -> tuple[int, ...]:
    """Reads on until `count` output tokens have come."""
    ids: tuple[int, ...] = ()
    while len(ids) < count:
        event = await anext(events)
        if isinstance(event, Tokens):
            ids += event.ids
    return ids


@asynccontextmanager
async def streaming(made: Stack, ids: Sequence[int], params: SamplingParams) -> AsyncIterator[AsyncIterator[Event]]:
    """A request whose first token has come; leaving goes away as a client does."""
    async with aclosing(made.client.generate(token_ids=ids, sampling=params, timeout_s=60.0)) as events:
        await read_tokens(events, 1)
        yield events


async def ends_elsewhere(made: Stack, ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """The tokens, but for the first few, of an answer whose decode worker is removed in the middle of it."""
    async with streaming(made, ids, params) as events:
        got = await read_tokens(events, 20)
        busy = next(worker for worker in made.decodes if worker.pipeline.count)
        await made.remove(busy)
        async for event in events:
            got += event.ids if isinstance(event, Tokens) else ()
    return got
