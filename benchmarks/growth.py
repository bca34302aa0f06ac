"""How time and memory grow with the prompt, the context, the batch and the page pool, beside what the ledger predicts.

Each sweep measures the engine and takes the ledger's bound for the same steps on this machine. Its exponent is the
slope of a straight line through the logarithms. What is judged is the growth of measured time over the bound: from
the best point of the smaller half to the worst of the larger half it may not rise by more than a quarter, so that no
term grows faster than the ledger says. Fixed costs make it fall.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import plot
from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.engine_sides import CHUNK_TOKENS
from benchmarks.report import Figure, make_parser, report
from pdserve.engine.engine import Engine
from pdserve.engine.ledger import Machine, Step, ledger, scalars_per_token
from pdserve.engine.load import find_smollm2, load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.machine import measure_machine
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan

DTYPE, ITEM_BYTES = "bf16", 2
PAGE_SIZE = 16
RISE_GOAL = 1.25
MEMORY_GOAL = 1.05


@dataclass(frozen=True)
class Sizes:
    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    batch_context: int
    pools: tuple[int, ...]  # pages
    repeats: int


FULL = Sizes(
    prompts=(128, 256, 512, 1024, 2048, 4096, 8192 - PAGE_SIZE),
    contexts=(128, 512, 1024, 2048, 4096, 8192 - PAGE_SIZE),
    batches=(1, 2, 4, 8, 16, 32),
    batch_context=256,
    pools=(1024, 2048, 4096, 8192, 16384),
    repeats=3,
)
QUICK = Sizes((32, 64, 128), (32, 64, 128), (1, 2, 4), 32, (256, 512), 1)


@dataclass(frozen=True)
class Point:
    x: float
    seconds: float
    bound_s: float

    @property
    def over(self) -> float:
        return self.seconds / self.bound_s


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Slope of log y over log x, by least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x = sum(x for x, _ in logs) / len(logs)
    mean_y = sum(y for _, y in logs) / len(logs)
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return slope


def rise(points: Sequence[Point]) -> float:
    """Measured over bound: the worst of the larger half over the best of the smaller half."""
    half = len(points) // 2
    return max(point.over for point in points[half:]) / min(point.over for point in points[:half])


class Growth:
    """The sweeps over one engine, whose page pool holds the largest of them."""

    def __init__(self, model: LoadedModel, sizes: Sizes, threads: int, kernels: str) -> None:
        tokens = max(*sizes.prompts, *sizes.contexts, max(sizes.batches) * (sizes.batch_context + PAGE_SIZE))
        pages = -(-tokens // PAGE_SIZE) + max(sizes.batches)
        config = EngineConfig(dtype=DTYPE, pages=pages, page_size=PAGE_SIZE, threads=threads, kernels=kernels)
        self._engine, self._sizes = Engine(model, config), sizes
        self._machine: Machine = measure_machine(DTYPE, threads)

    def prompts(self) -> list[Point]:
        """Prefill of one prompt, in a worker's chunks."""
        return [
            Point(tokens, self._best(lambda tokens=tokens: self._prefill(tokens)), self._bound(self._chunks(tokens)))  # type: ignore[misc]
            for tokens in self._sizes.prompts
        ]

    def contexts(self) -> list[Point]:
        """A decode step of one sequence."""
        return [self._decode(tokens, 1, tokens) for tokens in self._sizes.contexts]

    def batches(self) -> list[Point]:
        """A decode step of several sequences."""
        return [self._decode(batch, batch, self._sizes.batch_context) for batch in self._sizes.batches]

    def _decode(self, x: float, batch: int, context: int) -> Point:
        each = -(-(context + 1) // PAGE_SIZE)
        plan = StepPlan(
            tuple(Chunk(str(n), (n + 1,), context, tuple(range(n * each, (n + 1) * each))) for n in range(batch))
        )
        seconds = self._best(lambda: self._engine.step(plan), times=8)
        return Point(x, seconds, self._bound([Step(batch, 1, context)]))

    def _prefill(self, tokens: int) -> None:
        pages = tuple(range(-(-tokens // PAGE_SIZE)))
        for step in self._chunks(tokens):
            ids = tuple(1 + (step.cached + at) % 500 for at in range(step.tokens))
            self._engine.step(StepPlan((Chunk("p", ids, step.cached, pages),)))

    def _chunks(self, tokens: int) -> list[Step]:
        starts = range(0, tokens, CHUNK_TOKENS)
        return [Step(1, min(CHUNK_TOKENS, tokens - start), start) for start in starts]

    def _bound(self, steps: Sequence[Step]) -> float:
        return sum(ledger(self._engine.spec, step, DTYPE).bound(self._machine).seconds for step in steps)

    def _best(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds of one run: the fastest of the repeats, after one that does not count."""
        work()
        best = math.inf
        for _ in range(self._sizes.repeats):
            began = time.perf_counter()
            for _ in range(times):
                work()
            best = min(best, (time.perf_counter() - began) / times)
        return best


def pools(model: LoadedModel, sizes: Sizes) -> list[tuple[int, float, int]]:
    """(pages, resident bytes that the pool added once written, bytes that the ledger gives it)."""
    process = psutil.Process()
    token = scalars_per_token(model.spec) * ITEM_BYTES
    made = []
    for pages in sizes.pools:
        gc.collect()
        before = process.memory_info().rss
        engine = Engine(model, EngineConfig(dtype=DTYPE, pages=pages, page_size=PAGE_SIZE, kernels="plain"))
        engine.cache.storage.fill_(1)
        made.append((pages, float(process.memory_info().rss - before), pages * PAGE_SIZE * token))
        del engine
    return made


def judge(title: str, points: Sequence[Point]) -> list[Figure]:
    measured = exponent([(point.x, point.seconds) for point in points])
    predicted = exponent([(point.x, point.bound_s) for point in points])
    return [
        Figure(f"{title}: exponent of the time, against the ledger's", measured, "exponent", predicted),
        Figure(f"{title}: rise of time over bound", rise(points), "times", goal=RISE_GOAL, at_most=True),
        Figure(f"{title}: time over bound at the largest", points[-1].over, "times"),
    ]


TITLES = {
    "prompt": ("prefill against prompt length", "tokens of the prompt"),
    "context": ("decode step against context", "cached tokens"),
    "batch": ("decode step against batch", "sequences"),
}


def measure(model: LoadedModel, sizes: Sizes, options: argparse.Namespace) -> list[Figure]:
    growth = Growth(model, sizes, options.threads, options.kernels)
    sweeps = {"prompt": growth.prompts, "context": growth.contexts, "batch": growth.batches}
    figures = []
    for name, sweep in sweeps.items():
        print(f"measuring {TITLES[name][0]}", file=sys.stderr, flush=True)
        points = sweep()
        figures += judge(TITLES[name][0], points)
        if options.plots:
            draw(options.plots / f"growth-{name}.svg", *TITLES[name], points)
    del growth, sweeps
    found = pools(model, sizes)
    for pages, resident, expected in found:
        title = f"memory of a pool of {pages} pages, against the ledger"
        figures.append(Figure(title, resident / 1e6, "MB", expected / 1e6, MEMORY_GOAL, at_most=True))
    if options.plots:
        lines = [
            plot.Line("measured", [(pages, resident / 1e6) for pages, resident, _ in found]),
            plot.Line("ledger", [(pages, expected / 1e6) for pages, _, expected in found], dashed=True),
        ]
        axes = plot.Axis("pages of 16 tokens"), plot.Axis("MB resident")
        plot.save(options.plots / "growth-pool.svg", "memory against pool size", *axes, lines)
    return figures


def draw(path: Path, title: str, label: str, points: Sequence[Point]) -> None:
    lines = [
        plot.Line("measured", [(point.x, 1000 * point.seconds) for point in points]),
        plot.Line("ledger's bound", [(point.x, 1000 * point.bound_s) for point in points], dashed=True),
    ]
    plot.save(path, title, plot.Axis(label), plot.Axis("milliseconds"), lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the curves here as SVG")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", choices=("auto", "native", "plain"), default="native")
    options = parser.parse_args()
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(load_model(tiny_checkpoint(Path(folder)), DTYPE), QUICK, options)
    else:
        figures = measure(load_model(find_smollm2(), DTYPE), FULL, options)
    report(figures, options.json)


if __name__ == "__main__":
    main()
