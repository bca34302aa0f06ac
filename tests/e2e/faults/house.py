"""The installation that the matrix breaks: Redis, a router, two workers of each pool, and a client.

In a house with relays
every listener but the workers' own debug endpoint is reached through one, to make its network slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pdserve.client import AsyncClient
from pdserve.client.events import Completion
from pdserve.client.status import Status
from pdserve.errors import Unavailable
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.settings import RpcSettings
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.faults.place import NAMES, WORKERS, Place, free_ports
from tests.e2e.faults.process import Child, Plan
from tests.e2e.faults.questions import OUTPUT, SAMPLING, answers, probe
from tests.e2e.faults.relay import Relay
from tests.e2e.faults.table import Part, Step
from tests.e2e.stack import pause
from tests.redis_server import RedisServer

WAIT_S = 30.0  # for what has no bound of its own here; the machine may be busy
CLIENT_RPC = RpcSettings(connect_timeout_s=0.6, max_reconnect_backoff_s=0.1)

SLOW = {Part.PREFILL: 6e3, Part.DECODE: 6e3, Part.ROUTER: 2e3, Part.REDIS: 4e3}
"""Bytes per second, by whose network it is: a handoff takes longer than its lease, a snapshot seconds."""


class Leaked(AssertionError):
    """Pages that did not come back in time."""

    def __init__(self, pages: int, text: str) -> None:
        super().__init__(text)
        self.pages = pages


@dataclass
class House:
    """See the module's docstring. Belongs to the event loop that opened it."""

    directory: Path
    redis: RedisServer
    redis_relay: Relay | None
    places: dict[str, Place]
    client: AsyncClient
    channels: ChannelPool  # to the workers' debug endpoint
    pair: tuple[str, str] = ("", "")
    """The last one that the router chose: prefill, decode."""

    _reached: asyncio.Future[Place] | None = None
    _over: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    _starts: int = 0
    _probes: int = 0

    # -- processes -----------------------------------------------------------------------------

    async def start(self, name: str, *, same_ports: bool = False) -> None:
        """Starts who is missing at a place; returns once it serves."""
        place = self.places[name]
        assert place.child is None
        if not place.ports or not (same_ports or place.part is Part.ROUTER):  # clients know a router by its address
            place.ports = free_ports(1 if place.part is Part.PREFILL else 2)
        for relay, port in zip(place.relays, place.ports, strict=False):
            relay.aim(port)
        self._starts += 1
        url = self.redis.url if self.redis_relay is None else f"redis://{self.redis_relay.address}/0"
        plan = Plan(name, place.settings(url), self.directory / f"{self._starts:03}-{name}.log")
        place.child = Child(plan, self._on_message)
        await place.child.start()

    async def kill(self, name: str) -> None:
        place = self.places[name]
        if place.child is not None:
            await self.channels.drop(place.own_address)
            await place.child.kill()
        place.child, place.frozen = None, False

    async def freeze(self, name: str) -> None:
        await self.places[name].here.stop()
        self.places[name].frozen = True

    def thaw(self, name: str) -> None:
        self.places[name].here.resume()
        self.places[name].frozen = False

    async def revive(self, name: str) -> str:
        """Thaws a worker; returns once its push or its answer, of which it has one, is over: how it ended."""
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._over[name] = over
        self.thaw(name)
        async with asyncio.timeout(WAIT_S):
            return await over

    async def repair(self) -> None:
        """After a cell that failed: everybody anew."""
        for name in self.places:
            await self.kill(name)
        await asyncio.to_thread(self.redis.kill)
        await asyncio.to_thread(self.redis.start)
        self.hurry()
        await asyncio.gather(*map(self.start, self.places))
        await self.all_here()

    def logs(self) -> str:
        """What those here have last written."""
        return "\n".join(place.child.log_tail() for place in self.places.values() if place.child is not None)

    # -- the network -----------------------------------------------------------------------------

    def slow(self, part: Part, name: str) -> None:
        """Everything to and from one part. A prefill worker's pushes leave by the decode workers' doors."""
        if part is Part.REDIS:
            assert self.redis_relay is not None
            self.redis_relay.slow(SLOW[part])
            return
        for relay in self.places[name].relays:
            relay.slow(SLOW[part])
        if part is Part.PREFILL:
            connections = psutil.Process(self.places[name].here.pid).net_connections("tcp")
            sources = frozenset(each.laddr.port for each in connections)
            for decode in NAMES[Part.DECODE]:
                self.places[decode].relays[1].slow(SLOW[part], sources)

    def hurry(self) -> None:
        for relay in self._relays():
            relay.hurry()

    # -- points ------------------------------------------------------------------------------------

    async def arm(self, part: Part, step: Step) -> asyncio.Future[Place]:
        """Arms a step in all processes of a part; resolved with the first that reaches it, and holds there."""
        self._reached = asyncio.get_running_loop().create_future()
        living = [self.places[name] for name in NAMES[part] if self.places[name].living]
        await asyncio.gather(*(place.here.arm(step.value) for place in living))
        return self._reached

    async def disarm(self, part: Part, but: Place) -> None:
        others = [self.places[name] for name in NAMES[part] if name != but.name and self.places[name].living]
        await asyncio.gather(*(place.here.disarm() for place in others))

    def _on_message(self, child: Child, message: tuple[Any, ...]) -> None:
        if message[0] == "pair":
            self.pair = (message[1], message[2])
            return
        if message[0] == "over":
            if (waiting := self._over.pop(child.name, None)) is not None and not waiting.done():
                waiting.set_result(message[1])
            return
        assert message[0] == "reached", message
        if self._reached is None or self._reached.done():
            child.go()
        else:
            self._reached.set_result(self.places[child.name])

    # -- questions ---------------------------------------------------------------------------------

    async def ask(self, ids: Sequence[int] | None = None) -> Completion:
        """A request of which nothing is expected but the right answer. Raises AssertionError for a wrong one."""
        if ids is None:
            self._probes += 1
            ids = probe(self._probes)
        answer = await self.client.complete(token_ids=ids, sampling=SAMPLING, want_record=True, timeout_s=WAIT_S)
        assert answer.ids == answers()[tuple(ids)], f"{answer.ids} is not the answer: {answer.record}"
        assert answer.usage.output_tokens == OUTPUT and answer.finish.reason == "length", answer.finish
        return answer

    async def ask_until_up(self) -> Completion:
        """The same, of a router that is only just starting."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return await self.ask()
                except Unavailable:
                    await pause(0.02)

    async def serves(self, name: str) -> None:
        """Returns once a request was served by this worker."""
        async with asyncio.timeout(WAIT_S):
            while True:
                record = (await self.ask()).record
                if record is not None and name in (record.prefill_worker, record.decode_worker):
                    return

    async def until(self, holds: Callable[[Status], bool], within_s: float = WAIT_S) -> Status:
        end = time.monotonic() + within_s
        while not holds(status := await self.client.status(timeout_s=within_s)):
            workers = [(w.worker_id, w.state, round(w.lease_left_s, 1)) for w in status.workers]
            assert time.monotonic() < end, f"{workers} {status.registry_warning}"
            await pause(0.02)
        return status

    async def all_here(self) -> None:
        await self.until(
            lambda s: (
                tuple(w.worker_id for w in s.workers) == WORKERS
                and all(w.state == "ready" for w in s.workers)
                and not s.registry_warning
            )
        )

    # -- accounts ----------------------------------------------------------------------------------

    async def free(self, within_s: float) -> float:
        """Waits until no living worker holds anything; when that was. Raises AssertionError with what it still does."""
        end = time.monotonic() + within_s
        living = [place for place in self.places.values() if place.part is not Part.ROUTER and place.living]
        for place in living:
            while (accounts := await self._accounts(place)).holdings:
                holdings = [(h.owner, h.kind, h.pages, round(h.deadline_left_s, 2)) for h in accounts.holdings]
                if time.monotonic() >= end:
                    raise Leaked(accounts.pages_held, f"{place.name} still holds {holdings}")
                await pause(0.01)
            assert accounts.intact, f"{place.name}: {accounts.fault}"
            assert not accounts.pages_held, f"{place.name} holds {accounts.pages_held} pages for nobody"
            assert accounts.pages_free + accounts.pages_cached == accounts.pages_total, f"{place.name}: {accounts}"
        return time.monotonic()

    async def _accounts(self, place: Place) -> worker_pb2.AccountsResponse:
        stub: Any = worker_pb2_grpc.WorkerStub(self.channels.get(place.own_address))
        answer = await stub.Accounts(worker_pb2.AccountsRequest(), timeout=WAIT_S, wait_for_ready=True)
        assert isinstance(answer, worker_pb2.AccountsResponse)
        return answer

    def _relays(self) -> Iterable[Relay]:
        for place in self.places.values():
            yield from place.relays
        if self.redis_relay is not None:
            yield self.redis_relay


@asynccontextmanager
async def open_house(directory: Path, *, relays: bool) -> AsyncIterator[House]:
    """A house in which everybody serves."""
    answers()
    redis = RedisServer()
    made: list[Relay] = []

    async def relay() -> Relay:
        made.append(Relay())
        await made[-1].start()
        return made[-1]

    places = {}
    for part, names in NAMES.items():
        for name in names:
            count = 0 if not relays else 2 if part is Part.DECODE else 1
            places[name] = Place(name, part, tuple([await relay() for _ in range(count)]))
    places["router"].ports = free_ports(2)
    try:
        await asyncio.to_thread(redis.start)
        redis_relay = await relay() if relays else None
        if redis_relay is not None:
            redis_relay.aim(redis.port)
        async with AsyncClient(places["router"].addresses[0], CLIENT_RPC) as client:
            house = House(directory, redis, redis_relay, places, client, ChannelPool(CLIENT_RPC))
            try:
                await asyncio.gather(*map(house.start, places))
                await house.all_here()
                yield house
            finally:
                for name in places:
                    await house.kill(name)
                await house.channels.close()
    finally:
        for each in made:
            await each.close()
        await asyncio.to_thread(redis.close)
