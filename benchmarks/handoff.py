"""Time to the first token of a long prompt: prefilled here and decoded there, over one process that does both.

Three ways alternate, each with a new prompt, while the processes of the others are idle:

    one process   the same engine in chunks of the same size, no services: pdserve/local.py
    pair          a prefill and a decode worker over gRPC, asked as a router asks them
    router        the same two workers through a router and the Python client

Every process computes with one thread. The first token of the pair is there once the cache has arrived as a whole
and was verified, and decode has sampled from the logits that came with it. Medians.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.engine import tiny_checkpoint
from benchmarks.pair import TIMEOUT_S, random_prompt
from benchmarks.report import Figure, make_parser, report
from pdserve.client import AsyncClient, Tokens
from pdserve.engine.engine import Engine
from pdserve.engine.load import find_smollm2, load_model
from pdserve.engine.plan import EngineConfig
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.convert import sampling_to_proto
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from prefill_worker.settings import PrefillSettings

GOAL = 1.05
SAMPLING = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, seed=0)
"""Two tokens: for a single one the logits are enough, and no cache travels."""


@dataclass(frozen=True)
class Plan:
    tokens: int  # of each prompt
    rounds: int
    pages: int
    vocab: int
    dtype: str


FULL = Plan(tokens=1024, rounds=9, pages=512, vocab=49152, dtype="bf16")
QUICK = Plan(tokens=200, rounds=2, pages=128, vocab=512, dtype="fp32")


@dataclass(frozen=True)
class Stages:
    """One prompt through the pair, in milliseconds."""

    first_token: float  # asked .. first token here
    admission: float  # asked .. decode's ticket here
    queue: float
    prefill: float  # first chunk started .. logits ready
    tail: float  # logits ready .. decode has verified the cache and said so

    @property
    def rest(self) -> float:
        """The call to prefill, and after the acknowledgement the sampling and the way of the first token."""
        return self.first_token - self.admission - self.queue - self.prefill - self.tail


class Service:
    """`python -m NAME` until the block is left."""

    def __init__(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", name, "--stop-with-stdin", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def address(self) -> str:
        """Of its gRPC services, once it serves."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        words = line.replace(" grpc ", " ").split()
        if len(words) < 3:
            raise SystemExit(f"a service did not start: {line!r}")
        return words[words.index("ready:") + 1]


class OneProcess:
    """The whole engine in a child process of its own."""

    def __init__(self, path: Path, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_one_process, args=(path, plan, theirs), daemon=True)
        self._process.start()

    def first_token_ms(self, ids: Sequence[int], chunk_tokens: int) -> float:
        self._pipe.send((list(ids), chunk_tokens))
        return float(self._pipe.recv())

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _one_process(path: Path, plan: Plan, pipe: Connection) -> None:
    torch.set_num_threads(1)
    engine = Engine(load_model(path, plan.dtype), EngineConfig(dtype=plan.dtype, pages=plan.pages, threads=1))
    while (asked := pipe.recv()) is not None:
        ids, chunk_tokens = asked
        runner = LocalRunner(engine, chunk_tokens=chunk_tokens)
        began = time.perf_counter()
        events = runner.generate(ids, SAMPLING)
        next(events)
        pipe.send(1000 * (time.perf_counter() - began))
        for _ in events:
            pass


class Pair:
    """One prompt at a time, asked as a router asks."""

    def __init__(self, prefill: Any, decode: Any, contract: Any) -> None:
        self._prefill, self._decode, self._contract = prefill, decode, contract
        self._count = 0

    async def run(self, ids: Sequence[int]) -> Stages:
        self._count += 1
        name = f"handoff-{self._count}"
        opening = decode_pb2.DecodeOpen(
            request_id=name,
            tenant="benchmark",
            prompt_ids=ids,
            sampling=sampling_to_proto(SAMPLING),
            prefill_contract=self._contract,
        )
        began = time.perf_counter()
        call = self._decode.Generate(timeout=TIMEOUT_S)
        await call.write(decode_pb2.DecodeRequest(open=opening))
        admitted = (await call.read()).admitted
        ticket_here = time.perf_counter()
        running = self._prefill.Run(
            prefill_pb2.RunRequest(
                request_id=name,
                tenant="benchmark",
                prompt_ids=ids,
                ticket=admitted.ticket,
                identity=admitted.identity,
                decode_contract=admitted.contract,
            ),
            timeout=TIMEOUT_S,
        )
        event = await call.read()
        token_here = time.perf_counter()
        if event.WhichOneof("event") != "tokens":
            raise SystemExit(f"decode did not give a token: {event}")
        response = await running
        while event.WhichOneof("event") == "tokens":
            event = await call.read()
        return Stages(
            first_token=1000 * (token_here - began),
            admission=1000 * (ticket_here - began),
            queue=response.queued_ms,
            prefill=response.prefill_ms,
            tail=response.transfer_ms,
        )


async def through_router(client: AsyncClient, ids: Sequence[int]) -> float:
    """Milliseconds to the first token."""
    began, first = time.perf_counter(), 0.0
    async for event in client.generate(token_ids=list(ids), sampling=SAMPLING):
        if isinstance(event, Tokens) and not first:
            first = time.perf_counter() - began
    return 1000 * first


async def measure(plan: Plan, alone: OneProcess, prefill: str, decode: str, router: str) -> list[Figure]:
    chunk = PrefillSettings().chunk_tokens
    local: list[float] = []
    whole: list[float] = []
    stages: list[Stages] = []
    routed: list[float] = []
    async with channel(prefill) as to_prefill, channel(decode) as to_decode, AsyncClient(router) as client:
        status = await worker_pb2_grpc.WorkerStub(to_prefill).Describe(worker_pb2.DescribeRequest())
        pair = Pair(prefill_pb2_grpc.PrefillStub(to_prefill), decode_pb2_grpc.DecodeStub(to_decode), status.contract)
        async with asyncio.timeout(TIMEOUT_S):
            while not any(pair.fits for pair in (await client.status()).pairs):
                pass  # its picture of the pool is a moment old
        for number in range(-1, plan.rounds):  # the first warms everything up
            prompts = [random_prompt(plan.tokens, 4 * number + n + 4, plan.vocab) for n in range(4)]
            local.append(alone.first_token_ms(prompts[0], chunk))
            stages.append(await pair.run(prompts[1]))
            routed.append(await through_router(client, prompts[2]))
            whole.append(alone.first_token_ms(prompts[3], plan.tokens))
    return figures(plan, chunk, local[1:], whole[1:], stages[1:], routed[1:])


def figures(
    plan: Plan, chunk: int, local: list[float], whole: list[float], stages: list[Stages], routed: list[float]
) -> list[Figure]:
    alone = median(local)

    def stage(name: str, values: list[float]) -> Figure:
        return Figure(f"  of which {name}", median(values), "ms")

    what = f"time to first token of {plan.tokens} tokens"
    return [
        Figure(
            f"{what}: prefill and decode worker", median(s.first_token for s in stages), "ms", alone, GOAL, at_most=True
        ),
        stage("admission at decode", [s.admission for s in stages]),
        stage("queue at prefill", [s.queue for s in stages]),
        stage("prefill", [s.prefill for s in stages]),
        stage("tail of the transfer, after the logits", [s.tail for s in stages]),
        stage("the call to prefill, and sampling and sending the token", [s.rest for s in stages]),
        Figure(f"{what}: the same through a router", median(routed), "ms", alone, GOAL, at_most=True),
        Figure(f"one process, chunks of {chunk} (the peer)", alone, "ms"),
        Figure("one process, the whole prompt in one step", median(whole), "ms"),
    ]


def run(path: Path, plan: Plan) -> list[Figure]:
    worker = ["--model", str(path), "--dtype", plan.dtype, "--threads", "1", "--pages", str(plan.pages)]
    alone = OneProcess(path, plan)
    with ExitStack() as stack:
        stack.callback(alone.stop)
        router = stack.enter_context(Service("router", "--port", "0", "--http-port", "0")).address()
        worker += ["--registry", f"grpc://{router}"]
        services = [stack.enter_context(Service(name, *worker)) for name in ("prefill_worker", "decode_worker")]
        prefill, decode = [service.address() for service in services]
        return asyncio.run(measure(plan, alone, prefill, decode, router))


def main() -> None:
    options = make_parser(__doc__).parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            results = run(tiny_checkpoint(Path(folder)), QUICK)
    else:
        results = run(find_smollm2(), FULL)
    report(results, options.json)


if __name__ == "__main__":
    main()
