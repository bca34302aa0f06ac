"""The engines that `benchmarks.engine` compares: ours in this process, each peer in one of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from benchmarks.engine_cases import MARGIN
from benchmarks.peers.process import VLLM_ENVIRONMENT, PeerError, PeerProcess, find_model, find_python
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.ledger import Step, ledger
from pdserve.engine.machine import measure_machine
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.spec import ModelSpec
from prefill_worker.settings import PrefillSettings

PAGE_SIZE = 16
CHUNK_TOKENS = PrefillSettings().chunk_tokens
IDLE_SHARE = 0.05  # of one core, that a peer may take while it should sleep
PEERS = ("transformers", "vllm", "vllm-library", "llamacpp")
Prompts = Sequence[tuple[int, ...]]


class Side(Protocol):
    """One engine. Seconds are those of its own clock, around its work alone."""

    def prefill(self, prompts: Prompts) -> float:
        """Seconds from nothing to the logits after each prompt."""
        ...

    def fill(self, prompts: Prompts) -> None:
        """What `decode` goes on with; a first decode step included."""
        ...

    def decode(self, steps: int) -> float:
        """Seconds of further greedy steps, one token per sequence and step."""
        ...


def greedy(logits: Tensor) -> int:
    """Of the last row, [rows, vocab]; as the decode worker's sampler does it (decode_worker/sampling.py)."""
    return int(np.argmax(logits[-1].numpy()))


class Ours:
    """The engine as a worker calls it: plans of chunks over paged storage."""

    def __init__(self, engine: Engine, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._engine, self._chunk_tokens = engine, chunk_tokens
        self._lengths: list[int] = []
        self._tables: list[tuple[int, ...]] = []
        self._last: list[int] = []

    def prefill(self, prompts: Prompts) -> float:
        began = time.perf_counter()
        self._compute(prompts)
        return time.perf_counter() - began

    def fill(self, prompts: Prompts) -> None:
        self._compute(prompts)
        self.decode(1)

    def decode(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self._last = self._step(self._last)
        return time.perf_counter() - began

    def _compute(self, prompts: Prompts) -> None:
        blocks = BlockManager(self._engine.config.pages, PAGE_SIZE)
        self._lengths, self._tables, self._last = [len(ids) for ids in prompts], [], []
        for number, ids in enumerate(prompts):
            pages = blocks.allocate(str(number), blocks.pages_for(len(ids) + MARGIN))
            for start in range(0, len(ids), self._chunk_tokens):
                end = min(start + self._chunk_tokens, len(ids))
                chunk = Chunk("p", ids[start:end], start, pages, "last" if end == len(ids) else "none")
                logits = self._engine.step(StepPlan((chunk,))).logits
            self._tables.append(pages)
            self._last.append(greedy(logits["p"]))

    def _step(self, ids: Sequence[int]) -> list[int]:
        rows = zip(ids, self._lengths, self._tables, strict=True)
        plan = StepPlan(tuple(Chunk(str(n), (id,), at, table) for n, (id, at, table) in enumerate(rows)))
        logits = self._engine.step(plan).logits
        self._lengths = [length + 1 for length in self._lengths]
        return [greedy(logits[chunk.key]) for chunk in plan.chunks]


class Limit:
    """What the machine allows at the moment: how long reading what a step must read takes, or its arithmetic."""

    def __init__(self, spec: ModelSpec, step: Step, threads: int, dtype: str = "bf16") -> None:
        self._ledger, self._threads, self._dtype = ledger(spec, step, dtype), threads, dtype

    def prefill(self, prompts: Prompts) -> float:
        return self.decode(1)

    def fill(self, prompts: Prompts) -> None:
        pass

    def decode(self, steps: int) -> float:
        return steps * self._ledger.bound(measure_machine(self._dtype, self._threads)).seconds


class Peer:
    """A peer's process. Watches that it takes no processor time while others are measured."""

    def __init__(self, name: str, process: PeerProcess) -> None:
        self.name, self._process = name, process
        self._asleep: tuple[float, float] | None = None  # wall and processor seconds when it last answered

    def prefill(self, prompts: Prompts) -> float:
        return self._ask("prefill", prompts=prompts)

    def fill(self, prompts: Prompts) -> None:
        self._ask("fill", prompts=prompts)

    def decode(self, steps: int) -> float:
        return self._ask("decode", steps=steps)

    def stop(self) -> None:
        self._process.stop()

    def _ask(self, do: str, **arguments: object) -> float:
        if self._asleep is not None:
            wall, cpu = time.monotonic() - self._asleep[0], self._process.cpu_seconds() - self._asleep[1]
            if wall > 1 and cpu > IDLE_SHARE * wall:
                print(f"{self.name} took {cpu:.2f} s of processor in {wall:.1f} s of sleep", file=sys.stderr)
        made: float = self._process.ask(do, **arguments)
        self._asleep = time.monotonic(), self._process.cpu_seconds()
        return made


def open_peers(wanted: Sequence[str], path: Path, most_tokens: int, threads: int) -> dict[str, Peer]:
    """Those of `wanted` that are installed and start, loaded. What is missing is said on standard error."""
    started: dict[str, PeerProcess] = {}
    for name in wanted:
        process = _start(name, path, most_tokens, threads)
        if process is None:
            print(f"{name} is not installed: its figures stay without a peer (make peers)", file=sys.stderr)
        else:
            started[name] = process
    peers = {}
    for name, process in started.items():
        try:
            process.ready()
        except PeerError as error:
            print(error, file=sys.stderr)
            process.stop()
        else:
            peers[name] = Peer(name, process)
    return peers


def _start(name: str, path: Path, most_tokens: int, threads: int) -> PeerProcess | None:
    prefix = "benchmarks.peers."
    omp = {"OMP_NUM_THREADS": str(threads)}
    if name == "transformers":
        return PeerProcess(Path(sys.executable), prefix + "transformers_side", [path, threads])
    if name == "llamacpp":
        python = find_python("llamacpp")
        return None if python is None else PeerProcess(python, prefix + "llamacpp_side", [path, most_tokens, threads])
    python, model = find_python("vllm"), find_model()
    if python is None or model is None:
        return None
    if name == "vllm-library":
        return PeerProcess(python, prefix + "vllm_library_side", [model, most_tokens], {**VLLM_ENVIRONMENT, **omp})
    alone = {**VLLM_ENVIRONMENT, **omp, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return PeerProcess(python, prefix + "vllm_side", [model, most_tokens], alone)
