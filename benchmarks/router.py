"""What a router adds: to a request, to a token, and how that grows with workers and with streams.

Router, stub workers and clients are three processes. The stubs compute no model (stub_workers.py), so
what is left is the router's own work. Latency is compared with a client that talks to a stub
directly; work is the processor time of the router's process, from its own clock, so rates "per
core" do not depend on how many cores the three processes had. Growth is compared at one and
the same total rate of tokens. Workers send their heartbeats.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.report import Figure, make_parser, report
from benchmarks.stub_workers import CONTRACT, Stubs
from cache_transfer.wire import contract_to_proto
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.convert import sampling_to_proto
from pdserve.v1 import decode_pb2, decode_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from router.app import Router
from router.settings import RouterSettings

FLAT = 1.2  # the most that work per token may grow
PROMPT = (7,) * 128
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Plan:
    probes: int  # requests one after the other, for latency
    probe_tokens: int
    workers: tuple[int, ...]  # of each role
    streams: tuple[int, ...]
    tokens_per_s: int  # of all streams together
    seconds: float  # of each measurement
    rounds: int  # of all measurements of growth
    requests: int  # short ones, for requests/s
    concurrency: int


FULL = Plan(
    probes=200, probe_tokens=64, workers=(1, 20, 100), streams=(1, 10, 100, 1000), tokens_per_s=1000, seconds=5.0,
    rounds=3, requests=2000, concurrency=32,
)  # fmt: skip
QUICK = Plan(
    probes=10, probe_tokens=8, workers=(1, 3), streams=(1, 20), tokens_per_s=200, seconds=1.0, rounds=1, requests=50,
    concurrency=8,
)  # fmt: skip


class Process:
    """A child that runs `serve(pipe, *args)` until this end of the pipe closes. Blocking."""

    def __init__(self, serve: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(serve, theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        self.ready: str = self.pipe.recv()

    def cpu_s(self) -> float:
        self.pipe.send("cpu")
        seconds: float = self.pipe.recv()
        return seconds

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pipe.close()
        self._process.join()


def _child(serve: Callable[..., Coroutine[Any, Any, None]], pipe: Connection, *args: Any) -> None:
    asyncio.run(serve(pipe, *args))


async def _serve_router(pipe: Connection, max_active: int) -> None:
    router = Router(RouterSettings(port=0, http_port=0, max_active=max_active))
    await router.start()
    pipe.send(router.address)
    await _answer(pipe)
    await router.stop()


async def _serve_stubs(pipe: Connection, address: str, pairs: int) -> None:
    stubs = Stubs()
    await stubs.start(address, pairs)
    pipe.send(stubs.addresses[1])  # a decode worker's
    await _answer(pipe)
    await stubs.stop()


async def _answer(pipe: Connection) -> None:
    """Tells this process's time until the other end closes."""
    try:
        while True:
            await asyncio.to_thread(pipe.poll, None)
            pipe.recv()
            pipe.send(time.process_time())
    except EOFError:
        return


@dataclass
class Latency:
    """Seconds, per request and per token."""

    first: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)


async def through_router(stub: Any, tokens: int, pause_us: int, latency: Latency | None = None) -> int:
    """One request; returns the tokens that came."""
    sampling = sampling_to_proto(SamplingParams(max_tokens=tokens, seed=pause_us))
    request = gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenPrompt(ids=PROMPT), sampling=sampling)
    began, count = time.monotonic(), 0
    async for event in stub.Generate(request, timeout=TIMEOUT_S):
        if event.WhichOneof("event") == "tokens":
            _note(latency, event.tokens, began, count)
            count += len(event.tokens.ids)
    return count


async def directly(stub: Any, tokens: int, pause_us: int, latency: Latency) -> None:
    """The same request to a decode stub, as a router would send it."""
    opening = decode_pb2.DecodeOpen(
        request_id=secrets.token_hex(8),
        prompt_ids=PROMPT,
        sampling=sampling_to_proto(SamplingParams(max_tokens=tokens, seed=pause_us)),
        prefill_contract=contract_to_proto(CONTRACT),
    )
    began, count = time.monotonic(), 0
    call = stub.Generate(timeout=TIMEOUT_S)
    await call.write(decode_pb2.DecodeRequest(open=opening))
    while (event := await call.read()).WhichOneof("event") != "finish":
        if event.WhichOneof("event") == "tokens":
            _note(latency, event.tokens, began, count)
            count += len(event.tokens.ids)
    call.cancel()


def _note(latency: Latency | None, tokens: Any, began: float, count: int) -> None:
    if latency is None:
        return
    now = time.monotonic()
    if count == 0:
        latency.first.append(now - began)
    for start in range(0, len(tokens.text), 8):
        latency.token.append(now - int.from_bytes(tokens.text[start : start + 8], "little") / 1e9)


async def known(address: str, workers: int) -> None:
    """Returns once the router has seen so many workers."""
    async with channel(address) as to_router:
        gateway: Any = gateway_pb2_grpc.GatewayStub(to_router)
        while len((await gateway.Status(gateway_pb2.StatusRequest(), timeout=TIMEOUT_S)).workers) < workers:
            await asyncio.wait((asyncio.get_running_loop().create_future(),), timeout=0.05)


async def measure_latency(address: str, stub_address: str, plan: Plan) -> list[Figure]:
    """Medians, one request at a time, router and direct in turn."""
    routed, direct = Latency(), Latency()
    async with channel(address) as to_router, channel(stub_address) as to_stub:
        gateway, decode = gateway_pb2_grpc.GatewayStub(to_router), decode_pb2_grpc.DecodeStub(to_stub)
        for _ in range(plan.probes):
            await through_router(gateway, plan.probe_tokens, 1000, routed)
            await directly(decode, plan.probe_tokens, 1000, direct)
    first, token = (_median_ms(routed.first, direct.first), _median_ms(routed.token, direct.token))
    return [
        Figure("first token, through the router", first[0], "ms"),
        Figure("first token, added by the router", first[0] - first[1], "ms"),
        Figure("each token, through the router", token[0], "ms"),
        Figure("each token, added by the router", token[0] - token[1], "ms"),
    ]


def _median_ms(*samples: list[float]) -> tuple[float, ...]:
    return tuple(statistics.median(sample) * 1e3 for sample in samples)


async def measure_requests(router: Process, plan: Plan) -> Figure:
    """Requests of one token, closed loop, per second of the router's processor time."""
    async with channel(router.ready) as to_router:
        gateway = gateway_pb2_grpc.GatewayStub(to_router)
        left = iter(range(plan.requests))

        async def client() -> None:
            for _ in left:
                await through_router(gateway, 1, 0)

        before = router.cpu_s()
        await asyncio.gather(*(client() for _ in range(plan.concurrency)))
        return Figure("requests per second of a core", plan.requests / (router.cpu_s() - before), "1/s")


async def measure_tokens(router: Process, streams: int, plan: Plan) -> float:
    """Microseconds of the router's processor time per token, once every stream has its first one."""
    pause_us = round(1e6 * streams / plan.tokens_per_s)
    started, count, all_started = 0, 0, asyncio.Event()

    async def client(stub: Any) -> None:
        nonlocal started, count
        sampling = sampling_to_proto(SamplingParams(max_tokens=1 << 18, seed=pause_us))
        request = gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenPrompt(ids=PROMPT), sampling=sampling)
        first = True
        async for event in stub.Generate(request, timeout=TIMEOUT_S):
            if event.WhichOneof("event") == "tokens":
                count += len(event.tokens.ids)
                started += first
                first = False
                if started == streams:
                    all_started.set()

    async with channel(router.ready) as to_router:
        tasks = [asyncio.create_task(client(gateway_pb2_grpc.GatewayStub(to_router))) for _ in range(streams)]
        starting = asyncio.create_task(all_started.wait())
        await asyncio.wait({starting, *tasks}, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not all_started.is_set():
            raise SystemExit(f"only {started} of {streams} streams began")
        before_cpu, before = router.cpu_s(), count
        await asyncio.sleep(plan.seconds)
        used, tokens = router.cpu_s() - before_cpu, count - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return 1e6 * used / tokens


Point = tuple[int, int]  # workers of each role, streams


def measure(plan: Plan) -> list[Figure]:
    """Growth is measured in rounds, since the machine's speed wanders: the usual case and the others in turn."""
    figures: list[Figure] = []
    least, usual = plan.workers[0], plan.streams[-2]
    per_token: dict[Point, list[float]] = {}
    for turn in range(plan.rounds):
        for workers in plan.workers:
            with ExitStack() as stack:
                router = stack.enter_context(Process(_serve_router, max(plan.streams) + 64))
                stubs = stack.enter_context(Process(_serve_stubs, router.ready, workers))
                asyncio.run(known(router.ready, 2 * workers))
                if workers == least and not turn:
                    figures += asyncio.run(measure_latency(router.ready, stubs.ready, plan))
                    figures.append(asyncio.run(measure_requests(router, plan)))
                others = [streams for streams in plan.streams if streams != usual] if workers == least else []
                for streams in [each for other in others for each in (usual, other)] or [usual]:
                    spent = asyncio.run(measure_tokens(router, streams, plan))
                    per_token.setdefault((workers, streams), []).append(spent)
    base = statistics.median(per_token.pop((least, usual)))
    figures.append(Figure(f"tokens per second of a core, {usual} streams", 1e6 / base, "1/s"))
    figures.append(Figure(f"work per token, {2 * least} workers, {usual} streams", base, "us"))
    for (workers, streams), values in per_token.items():
        name = f"work per token, {2 * workers} workers, {streams} streams"
        figures.append(Figure(name, statistics.median(values), "us", peer=base, goal=FLAT, at_most=True))
    return figures


def main() -> int:
    options = make_parser(__doc__).parse_args()
    report(measure(QUICK if options.quick else FULL), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
