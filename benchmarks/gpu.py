"""The engine on one CUDA device: decode and prefill against the device's measured limits, and parity with the CPU.

    parity    the same steps on both devices, in fp32: logits and the tokens that are chosen; recorded and plain steps
    decode    tokens per second of recorded steps and of plain ones, over what bandwidth and arithmetic allow
    prefill   tokens per second of one prompt, over the same
    staging   bytes per second of rows between pages and host, and decode while a thread moves them, over decode alone

Decode and prefill run a Llama of 1.1 billion parameters with random weights, made on the device; four minutes at most.
Without a CUDA device nothing is measured: the figures with goals are printed with `met` null, and the reason.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.report import Figure, make_parser, report
from cache_transfer.contract import PositionScheme
from cache_transfer.encoding import sha256
from pdserve.engine.cache import Rows
from pdserve.engine.dtypes import torch_dtype
from pdserve.engine.engine import Engine
from pdserve.engine.graphs import DecodeGraphs
from pdserve.engine.ledger import Machine, Step, ledger
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.machine import measure_machine
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from pdserve.engine.spec import ModelSpec
from pdserve.engine.weights import expected_tensors

PAGE_SIZE = 16
Tokens = Sequence[Sequence[int]]  # of each step, one per sequence
SMALL = ModelSpec(
    vocab_size=512, width=256, layers=4, heads=8, kv_heads=2, head_dim=64, ffn_width=512, context_limit=512,
    positions=PositionScheme(kind="rope", theta=10000.0, dims=64),
)  # fmt: skip
LARGE = ModelSpec(
    vocab_size=32000, width=2048, layers=22, heads=32, kv_heads=4, head_dim=64, ffn_width=5632, context_limit=8192,
    positions=PositionScheme(kind="rope", theta=10000.0, dims=64),
)  # fmt: skip
STEPS = ("plain", "recorded")
DECODE_GOAL = 0.6  # of the limit, as on a CPU
PARITY = 1e-3  # largest difference of two fp32 logits over the largest logit: the devices sum in other orders


@dataclass(frozen=True)
class Sizes:
    model: ModelSpec
    batches: tuple[int, ...]
    context: int
    prompts: tuple[int, ...]
    steps: int
    staged_bytes: int


FULL = Sizes(LARGE, (1, 8, 32, 128), 512, (512, 2048), 32, 256 << 20)
QUICK = Sizes(SMALL, (1, 4), 64, (64,), 4, 1 << 20)


def random_model(of: ModelSpec, dtype: str, device: str) -> LoadedModel:
    """Normal weights that keep activations near one, made on the device; the same for the same device."""
    generator = torch.Generator(device).manual_seed(1)
    tensors = {}
    for name, shape in expected_tensors(of).items():
        spread = 0.02 if len(shape) < 2 else shape[-1] ** -0.5
        values = torch.randn(shape, generator=generator, device=device) * spread
        tensors[name] = (values + 1 if name.endswith(".scale") else values).to(torch_dtype(dtype))
    return LoadedModel("random", of, tensors, dtype, sha256("gpu", of.width))


def tables(batch: int, tokens: int) -> list[tuple[int, ...]]:
    each = -(-tokens // PAGE_SIZE)
    return [tuple(range(n * each, (n + 1) * each)) for n in range(batch)]


def fill(engine: Engine, pages: Sequence[tuple[int, ...]], tokens: int) -> None:
    for number, table in enumerate(pages):
        drawn = random.Random(number)
        ids = tuple(drawn.randrange(engine.spec.vocab_size) for _ in range(tokens))
        engine.step(StepPlan((Chunk(str(number), ids, 0, table, "none"),)))


def decode_steps(
    engine: Engine, pages: Sequence[tuple[int, ...]], start: int, steps: int, forced: Tokens = ()
) -> tuple[Tokens, Tensor]:
    """What each step chooses greedily (it is fed `forced`, if given), and the last logits [sequences, vocab]."""
    last, made = [7 + n for n in range(len(pages))], []
    for step in range(steps):
        chunks = [Chunk(str(n), (last[n],), start + step, table) for n, table in enumerate(pages)]
        found = engine.step(StepPlan(tuple(chunks))).logits
        logits = torch.cat([found[chunk.key][-1:] for chunk in chunks])
        made.append(logits.argmax(-1).tolist())
        last = list(forced[step]) if forced else made[-1]
    return made, logits


def seconds_of(work: Callable[[], object], device: str, repeats: int = 3) -> float:
    """The fastest run after one that does not count."""
    best = float("inf")
    for number in range(repeats + 1):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        if number:
            best = min(best, time.perf_counter() - began)
    return best


def graphs_of(engine: Engine) -> DecodeGraphs | None:
    """On a CPU the same padded steps, but not recorded."""
    on_host = engine.device.type == "cpu"
    return DecodeGraphs(engine._plain, lambda work: work) if on_host else engine.graphs


def measure_parity(device: str) -> list[Figure]:
    """SMALL on the CPU against the device, with the plain path of both; then recorded steps against plain ones."""
    model = random_model(SMALL, "fp32", "cpu")
    config = EngineConfig(dtype="fp32", pages=256, page_size=PAGE_SIZE, kernels="plain")
    pages = tables(5, 128)
    host, plain, recorded = (Engine(model, replace(config, device=at)) for at in ("cpu", device, device))
    plain.graphs, recorded.graphs = None, graphs_of(recorded)
    fill(host, pages, 64)
    tokens, expected = decode_steps(host, pages, 64, 8)
    figures = []
    for title, engine in zip(STEPS, (plain, recorded), strict=True):
        fill(engine, pages, 64)
        chosen, logits = decode_steps(engine, pages, 64, 8, tokens)
        error = float((logits.cpu() - expected).abs().max() / expected.abs().max())
        same = sum(
            a == b for mine, theirs in zip(chosen, tokens, strict=True) for a, b in zip(mine, theirs, strict=True)
        )
        name = f"parity, {title} steps against the CPU"
        figures += [
            Figure(name, error, "of the largest logit", goal=PARITY, at_most=True),
            Figure(f"{name}: tokens equal", same / (8 * len(pages)), "of all"),
        ]
    return figures


def measure_decode(engine: Engine, sizes: Sizes, machine: Machine, device: str) -> list[Figure]:
    figures, graphs = [], graphs_of(engine)
    for batch in sizes.batches:
        pages = tables(batch, sizes.context + sizes.steps)
        fill(engine, pages, sizes.context)
        bound = ledger(engine.spec, Step(batch, 1, sizes.context), engine.config.dtype).bound(machine).seconds
        for title in ("recorded", "plain"):
            engine.graphs = graphs if title == "recorded" else None
            work = lambda pages=pages: decode_steps(engine, pages, sizes.context, sizes.steps)  # noqa: E731
            rate = batch * sizes.steps / seconds_of(work, device)
            goal = DECODE_GOAL if title == "recorded" else None
            name = f"decode, batch {batch} after {sizes.context} tokens, {title} steps, against the limit"
            figures.append(Figure(name, rate, "tokens/s", batch / bound, goal))
        engine.graphs = graphs
    return figures


def measure_prefill(engine: Engine, sizes: Sizes, machine: Machine, device: str) -> list[Figure]:
    figures = []
    for tokens in sizes.prompts:
        bound = ledger(engine.spec, Step(1, tokens), engine.config.dtype).bound(machine).seconds
        pages = tables(1, tokens)
        rate = tokens / seconds_of(lambda pages=pages, tokens=tokens: fill(engine, pages, tokens), device)  # type: ignore[misc]
        figures.append(Figure(f"prefill, {tokens} tokens, against the limit", rate, "tokens/s", tokens / bound))
    return figures


def measure_staging(engine: Engine, sizes: Sizes, device: str) -> list[Figure]:
    """Rows of one sequence out of the pages and back, as a handoff moves them."""
    cache = engine.cache
    tokens = min(sizes.context, cache.capacity)
    (pages,) = tables(1, tokens)
    rows = cache.rows(shape := cache.shape("k", 0), (0, shape[0]), (0, tokens), pages)
    payload = memoryview(bytearray(rows.index.size * rows.row_bytes))
    times = max(1, sizes.staged_bytes // len(payload))
    figures = []
    for title, move in (("out of the pages", cache.read_rows), ("into the pages", cache.write_rows)):

        def work(move: Callable[[str, int, Rows, memoryview], None] = move) -> None:
            for n in range(times):
                move("k", n % cache.layers, rows, payload)

        rate = times * len(payload) / seconds_of(work, device) / 1e9
        figures.append(Figure(f"staging, {title}", rate, "GB/s"))
    return [*figures, measure_overlap(engine, sizes, device, rows, payload)]


def measure_overlap(engine: Engine, sizes: Sizes, device: str, rows: Rows, payload: memoryview) -> Figure:
    """Decode while a thread reads rows of pages that no sequence uses without a pause, over decode alone."""
    pages = tables(max(sizes.batches), sizes.context + sizes.steps)[1:]
    fill(engine, pages, sizes.context)

    def rate() -> float:
        work = lambda: decode_steps(engine, pages, sizes.context, sizes.steps)  # noqa: E731
        return len(pages) * sizes.steps / seconds_of(work, device)

    alone, stop = rate(), threading.Event()

    def stage() -> None:
        while not stop.is_set():
            engine.cache.read_rows("k", 0, rows, payload)

    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(stage)
        try:
            beside = rate()
        finally:
            stop.set()
        staging.result()
    return Figure("decode while rows are staged, against alone", beside, "tokens/s", alone)


def measure(sizes: Sizes, device: str) -> list[Figure]:
    dtype = "bf16" if device != "cpu" else "fp32"
    figures = measure_parity(device)
    longest = max(max(sizes.batches) * (sizes.context + sizes.steps + PAGE_SIZE), *sizes.prompts)
    config = EngineConfig(
        dtype=dtype, pages=-(-longest // PAGE_SIZE), page_size=PAGE_SIZE, device=device, kernels="plain"
    )
    engine = Engine(random_model(sizes.model, dtype, device), config)
    print(engine.contract().info["kernels"], file=sys.stderr)
    machine = measure_machine(dtype, 1, device)
    figures += measure_decode(engine, sizes, machine, device)
    figures += measure_prefill(engine, sizes, machine, device)
    return figures + measure_staging(engine, sizes, device)


def without_a_device() -> list[Figure]:
    """The goals, unjudged."""
    unit = "not measured"
    return [
        *(Figure(f"parity, {kind} steps against the CPU", 0.0, unit, None, PARITY, True, True) for kind in STEPS),
        *(
            Figure(f"decode, batch {n} after {FULL.context} tokens, recorded steps, against the limit", 0.0, unit, None,
                   DECODE_GOAL, False, True)
            for n in FULL.batches
        ),
    ]  # fmt: skip


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", help="cpu runs the same script without a GPU, for a test of itself")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"nothing measured: torch {torch.__version__.split('+')[0]} sees no CUDA device", file=sys.stderr)
        report(without_a_device(), options.json)
        return
    report(measure(QUICK if options.quick else FULL, options.device), options.json)


if __name__ == "__main__":
    main()
