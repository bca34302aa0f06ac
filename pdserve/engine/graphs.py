"""Decode steps as recorded graphs: one launch per step instead of hundreds, where launching costs more than computing.

A recorded graph has fixed shapes and fixed addresses. So a step's sequences are padded to a bucket of sequences and of
pages, its numbers go into one tensor that stays where it is, and the weights and the cache's pages never move:

    numbers [4 + pages, sequences]    token, position, slot, keys seen; then the pages of each sequence

A sequence that only pads repeats the first one: it computes the same and writes the same bytes to the same slot. A
graph is recorded when its bucket is first met; both kinds of buckets grow by factors, so there are few.

Recording is a callable: `record_cuda` on a GPU. Any other callable that returns its work serves without a GPU, so that
everything but the recording itself runs, and is compared with plain steps, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine import attention
from pdserve.engine.batch import Batch, Group, stale_slots
from pdserve.engine.cache import PagedCache
from pdserve.engine.dtypes import wide
from pdserve.engine.paged import Kernel, MakeKernel, choose
from pdserve.engine.plain import PlainPath, Reads
from pdserve.engine.plan import EngineConfig, StepCounters, StepOutput, StepPlan
from pdserve.engine.spec import ModelSpec

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
FIRST_PAGES = 8
_NUMBERS = 4  # rows before the pages

Work = Callable[[], Tensor]
Record = Callable[[Work], Work]


def record_cuda(work: Work) -> Work:
    """Warms up, records, and returns a replay whose tensor every replay writes again."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def why_not(spec: ModelSpec) -> str:
    """What keeps a model's decode steps from being recorded; empty: nothing does."""
    if any(shape.kernel for shape in spec.layer_shapes):
        return "short convolutions"
    return "experts are chosen step by step" if spec.experts else ""


def open_graphs(path: PlainPath, config: EngineConfig) -> DecodeGraphs | None:
    """On a CUDA device, outside deterministic mode, for models whose steps can be recorded."""
    if not config.device.startswith("cuda") or config.deterministic or why_not(path.decoder.spec):
        return None
    kernel = choose(path.decoder.spec, path.cache)
    return DecodeGraphs(path, record_cuda, kernel.make, kernel.why)


def bucket(count: int, sizes: tuple[int, ...]) -> int | None:
    """The least size that holds so many; None beyond the last."""
    return next((size for size in sizes if size >= count), None)


@dataclass
class _Recorded:
    numbers: Tensor  # on the device
    host: Tensor  # the same, pinned where there is a device
    replay: Work
    kernel: Kernel | None


class DecodeGraphs:
    """The recorded steps of one engine. Used in the engine's thread."""

    def __init__(self, path: PlainPath, record: Record, kernel: MakeKernel | None = None, why: str = "") -> None:
        """kernel: makes attention over pages for a bucket; None: the plain one, and `why` in words."""
        self._path, self._record, self._make_kernel, self._why = path, record, kernel, why
        self._cache, self._spec = path.cache, path.decoder.spec
        sizes = [FIRST_PAGES]
        while sizes[-1] < self._cache.pages:
            sizes.append(2 * sizes[-1])
        self._pages = tuple(sizes)
        self._made: dict[tuple[int, int], _Recorded] = {}
        self.steps = 0

    @property
    def recorded(self) -> int:
        return len(self._made)

    @property
    def most(self) -> int:
        """Graphs that can ever be recorded."""
        return len(BATCHES) * len(self._pages)

    def describe(self) -> str:
        """For the contract's information."""
        return "decode graphs, attention " + (self._why if self._make_kernel else f"plain ({self._why})")

    def takes(self, plan: StepPlan) -> bool:
        """Whether every chunk is one token of a decoding sequence without an adapter."""
        return len(plan.chunks) <= BATCHES[-1] and all(
            len(chunk.ids) == 1 and chunk.logits == "last" and chunk.adapter is None for chunk in plan.chunks
        )

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput:
        """As Engine.step, for a plan that `takes` accepts and the engine has checked."""
        chunks, size, written = plan.chunks, self._cache.page_size, tuple(self._cache.written)
        held = [chunk.start // size + 1 for chunk in chunks]
        made = self._graph(bucket(len(chunks), BATCHES) or len(chunks), bucket(max(held), self._pages) or max(held))
        columns = made.host.shape[1]
        self._cache.join()
        self._cache.clear(stale_slots(chunks, self._cache))
        rows = [
            [
                chunk.ids[0],
                chunk.start,
                chunk.pages[n - 1] * size + chunk.start % size,
                chunk.start + 1,
                *chunk.pages[:n],
            ]
            for chunk, n in zip(chunks, held, strict=True)
        ]
        height = made.host.shape[0]
        rows = [row + [self._cache.pad] * (height - len(row)) for row in rows]
        made.host.copy_(torch.tensor(rows + rows[:1] * (columns - len(rows)), dtype=torch.int64).T)
        made.numbers.copy_(made.host)
        if made.kernel is not None:
            made.kernel.plan(made.host[_NUMBERS:].T, made.host[3])
        scores = made.replay()[: len(chunks)]
        with torch.inference_mode(False):  # memory of its own, which a sampler may change in place
            out = torch.empty(scores.shape, dtype=wide(scores.dtype), device=scores.device)
        out.copy_(scores)
        self._cache.written = [before + len(chunks) for before in written]
        self._cache.mark()
        self.steps += 1
        counters = self._counters([chunk.start + 1 for chunk in chunks])
        logits = {chunk.key: out[row : row + 1] for row, chunk in enumerate(chunks)}
        return StepOutput(logits, counters, (len(chunks),) * self._cache.layers)

    def _counters(self, ends: list[int]) -> StepCounters:
        layers = range(self._spec.layers)
        scores = [(self._spec.window(i), shape.heads) for i in layers if (shape := self._spec.shape_of(i)).kv_heads]
        pairs = sum(min(end, window or end) * heads for window, heads in scores for end in ends)
        return StepCounters(len(ends) * self._spec.layers, pairs)

    def _graph(self, batch: int, pages: int) -> _Recorded:
        key = (batch, pages)
        if key not in self._made:
            device = self._cache.storage.device
            numbers = torch.zeros(_NUMBERS + pages, batch, dtype=torch.int64, device=device)
            numbers[3] = 1  # key seen, of the pad page
            numbers[_NUMBERS:] = self._cache.pad
            host = torch.zeros(numbers.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
            kernel = self._make_kernel(batch, pages) if self._make_kernel is not None else None
            if kernel is not None:
                kernel.plan(numbers[_NUMBERS:].T.cpu(), numbers[3].cpu())
            self._made[key] = _Recorded(numbers, host, self._record_step(numbers, kernel), kernel)
        return self._made[key]

    def _record_step(self, numbers: Tensor, kernel: Kernel | None) -> Work:
        """Recorded while one slot of the pad page is lent out, which is zero again afterwards."""
        numbers[2] = self._cache.pad * self._cache.page_size
        replay = self._record(lambda: self._step(numbers, kernel))
        self._cache.clear(numbers[2, :1])
        return replay

    def _step(self, numbers: Tensor, kernel: Kernel | None) -> Tensor:
        """The whole step, on the numbers' device, without a word to the host. Scores [sequences, vocab_size]."""
        path, spec = self._path, self._spec
        ids, positions, slots, ends = numbers[:_NUMBERS]
        table = numbers[_NUMBERS:].T
        batch = _static_batch(self._cache, ids, positions, slots, ends, table)
        work = path.begin(batch, keep=False)
        reads = {window: _StaticReads(ends, window) for window in {spec.window(i) for i in range(spec.layers)}}
        x = path.embed(batch)
        for layer in range(spec.layers):
            q, _, _ = work.inputs(layer, x)
            o = work.attend(layer, q, reads[spec.window(layer)]) if kernel is None else kernel.attend(layer, q)
            x = work.output(layer, x, o)
        return path.logits(x)


def _static_batch(
    cache: PagedCache, ids: Tensor, positions: Tensor, slots: Tensor, ends: Tensor, table: Tensor
) -> Batch:
    keys = table.shape[1] * cache.page_size
    batch = Batch(
        chunks=[], ids=ids, positions=positions, places=ends - 1, slots=slots, stale=slots[:0],
        wanted=[], wanted_rows=slots[:0], cache=cache,
    )  # fmt: skip
    batch.groups = [Group(0, len(ids), cache.tables(table), len(ids), keys, decode=True)]
    return batch


class _StaticReads(Reads):
    """As `Reads`, without a question to the host; padding keys are masked by the number of keys seen."""

    def __init__(self, end: Tensor, window: int) -> None:
        self.end = end
        self.first = (end - window).clamp(min=0) if window else torch.zeros_like(end)
        self.window = window
        self._biases: dict[int, Tensor] = {}

    def bias(self, number: int, group: Group, dtype: torch.dtype, keys: int, slopes: Tensor | None = None) -> Tensor:
        if number not in self._biases:
            at = torch.arange(keys, device=self.end.device)
            hidden = (at < self.first[:, None]) | (at >= self.end[:, None])
            made = torch.zeros(hidden.shape, dtype=dtype, device=at.device).masked_fill(hidden, -torch.inf)[:, None]
            if slopes is not None:
                made = made + attention.alibi(slopes, at - (self.end[:, None] - 1), dtype).transpose(1, 2)
            self._biases[number] = made
        return self._biases[number]
