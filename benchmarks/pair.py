"""One prefill and one decode worker, each in a process of its own, driven as a router would."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.convert import sampling_to_proto
from pdserve.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker

TIMEOUT_S = 600.0

HandOver = Callable[[decode_pb2.Admitted], Awaitable[None]]


@dataclass(frozen=True)
class Memory:
    """Of one worker's process, in bytes."""

    resident: int
    peak: int  # highest resident size since the last `reset_peak`
    tensors: int  # storages of all live tensors, each counted once
    weights: int  # of the checkpoint, in the engine's dtype
    cache: int  # the configured page pool
    token: int  # cache of one token


class WorkerProcess:
    """A worker in a child process. Blocking; ends when it is told to, or when this process does."""

    def __init__(self, path: Path, settings: PrefillSettings | DecodeSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(path, settings, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def started(self) -> str:
        """Waits for the worker; returns its address."""
        return str(self._pipe.recv())

    def memory(self) -> Memory:
        return Memory(**self._ask("memory"))

    def reset_peak(self) -> None:
        self._ask("reset_peak")

    def touch_cache(self) -> None:
        """Writes the whole page pool, so that all of it is resident. The worker must be idle."""
        self._ask("touch_cache")

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()


class Pair:
    """Requests through both workers."""

    def __init__(self, prefill: Any, decode: Any, contract: common_pb2.WorkerContract) -> None:
        self._prefill, self._decode, self.contract = prefill, decode, contract
        self._count = 0

    async def generate(
        self, ids: Sequence[int], max_tokens: int, hand_over: HandOver | None = None
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        """Greedy output of exactly `max_tokens`: the events after admission, as they arrive.

        Args:
            hand_over: brings the cache; by default the prefill worker computes and pushes it.
        """
        self._count += 1
        request_id = f"benchmark-{self._count}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        opening = decode_pb2.DecodeOpen(
            request_id=request_id,
            tenant="benchmark",
            prompt_ids=ids,
            sampling=sampling_to_proto(params),
            prefill_contract=self.contract,
        )
        call = self._decode.Generate(timeout=TIMEOUT_S)
        try:
            await call.write(decode_pb2.DecodeRequest(open=opening))
            admitted = (await call.read()).admitted
            await (hand_over(admitted) if hand_over else self._run(request_id, ids, admitted))
            ended = False
            while not ended:
                event = await call.read()
                ended = event.WhichOneof("event") != "tokens"
                yield event
        finally:
            call.cancel()

    async def _run(self, request_id: str, ids: Sequence[int], admitted: decode_pb2.Admitted) -> None:
        await self._prefill.Run(
            prefill_pb2.RunRequest(
                request_id=request_id,
                tenant="benchmark",
                prompt_ids=ids,
                ticket=admitted.ticket,
                identity=admitted.identity,
                decode_contract=admitted.contract,
                logits_only=admitted.logits_only,
            ),
            timeout=TIMEOUT_S,
        )

    async def handoff(self, ids: Sequence[int]) -> None:
        """One whole prompt handed over; two tokens, so that its cache travels."""
        async for _ in self.generate(ids, 2):
            pass


@asynccontextmanager
async def drive(prefill_address: str, decode_address: str) -> AsyncIterator[Pair]:
    async with channel(prefill_address) as to_prefill, channel(decode_address) as to_decode:
        status = await worker_pb2_grpc.WorkerStub(to_prefill).Describe(worker_pb2.DescribeRequest())
        prefill, decode = prefill_pb2_grpc.PrefillStub(to_prefill), decode_pb2_grpc.DecodeStub(to_decode)
        yield Pair(prefill, decode, status.contract)


def _child(path: Path, settings: PrefillSettings | DecodeSettings, pipe: Connection) -> None:
    asyncio.run(_serve(path, settings, pipe))


async def _serve(path: Path, settings: PrefillSettings | DecodeSettings, pipe: Connection) -> None:
    model = load_model(path, settings.engine.dtype)
    weights = _weight_bytes(model)
    worker: PrefillWorker | DecodeWorker = (
        PrefillWorker(model, None, settings)
        if isinstance(settings, PrefillSettings)
        else DecodeWorker(model, None, settings)
    )
    del model
    pipe.send(await worker.start())
    try:
        while True:
            await asyncio.to_thread(pipe.poll, None)
            match pipe.recv():
                case "memory":
                    pipe.send(asdict(_measure(worker, weights)))
                case "touch_cache":
                    worker.engine.cache.storage.zero_()
                    pipe.send(None)
                case "reset_peak":
                    _reset_peak()
                    pipe.send(None)
    except EOFError:
        await worker.stop()


def _measure(worker: PrefillWorker | DecodeWorker, weights: int) -> Memory:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    cache = worker.engine.cache
    return Memory(
        resident=_kib(status, "VmRSS"),
        peak=_kib(status, "VmHWM"),
        tensors=live_tensor_bytes(),
        weights=weights,
        cache=cache.nbytes,
        token=cache.nbytes // ((cache.pages + 1) * cache.page_size),
    )


def _reset_peak() -> None:
    """Linux: 5 sets the peak back to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def live_tensor_bytes() -> int:
    """Storages of every tensor that Python can reach, each counted once."""
    tensors = (found for found in gc.get_objects() if issubclass(type(found), Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _weight_bytes(model: LoadedModel) -> int:
    storages = (tensor.untyped_storage() for tensor in model.tensors.values())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _kib(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise SystemExit(f"this system does not report {name}: the benchmark needs Linux")
    return int(found[1]) * 1024


def random_prompt(tokens: int, seed: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(vocab, (tokens,), generator=generator)]
