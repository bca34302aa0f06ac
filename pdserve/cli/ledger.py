"""`pdserve ledger`: what a step of a model costs and how fast it can be, from its spec alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pdserve.cli.console import out, progress
from pdserve.engine.ledger import ITEM_BYTES, Bound, Ledger, Machine, Step, ledger
from pdserve.engine.packaged import model_path
from pdserve.errors import InvalidRequest

Option = typer.Option


def ledger_command(
    model: Annotated[
        str, typer.Argument(help="A checkpoint (config.json or headers are enough), a spec as .json, or smollm2.")
    ],
    prompt: Annotated[int, Option(help="Tokens of the prompt.")] = 512,
    batch: Annotated[int, Option(help="Sequences of a step.")] = 1,
    dtype: Annotated[str, Option(help="Of weights and activations: fp32, bf16, fp16 or float64.")] = "fp32",
    kv_dtype: Annotated[str, Option(help="Of the KV cache; empty: the same.")] = "",
    gflops: Annotated[float, Option(help="Effective GFLOP/s of the machine; 0: measure this one.")] = 0.0,
    gbytes: Annotated[float, Option(help="Effective memory bandwidth in GB/s; 0: measure this one.")] = 0.0,
    threads: Annotated[int, Option(help="Threads to measure with, and to run with.")] = 1,
    run: Annotated[bool, Option("--run", help="Run both steps too, and print measured time over the bound.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Shapes, FLOPs, bytes, intensity and the least time of a prefill and of the decode step after it.

    The figures of a row are those of one operation; `times` says how many of it a step has.

    \b
    pdserve ledger smollm2 --prompt 512
    pdserve ledger meta/config-dir --prompt 4096 --batch 8 --gflops 900000 --gbytes 4800
    """
    _check_types({"dtype": dtype, "kv_dtype": kv_dtype or dtype})
    _check_least(1, {"prompt": prompt, "batch": batch, "threads": threads})
    _check_least(0, {"gflops": gflops, "gbytes": gbytes})
    # torch takes seconds to import; --help and the other commands do not need it.
    from pdserve.engine.spec_file import read_spec

    path = model_path(model)
    spec = read_spec(path)
    steps = {"prefill": Step(batch, prompt), "decode": Step(batch, 1, prompt)}
    ledgers = {name: ledger(spec, step, dtype, kv_dtype) for name, step in steps.items()}
    machine = _machine(gflops, gbytes, dtype, threads)
    measured = _run(path, steps, dtype, kv_dtype, threads) if run else {}
    if as_json:
        print(json.dumps({name: _plain(found, machine, measured.get(name)) for name, found in ledgers.items()}))
        return
    out.print(f"{path.name}: {dtype}, {machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s")
    for name, found in ledgers.items():
        out.print(_table(name, found, machine))
        out.print(_summary(found, machine, measured.get(name)))


def _check_types(given: dict[str, str]) -> None:
    for name, value in given.items():
        if value not in ITEM_BYTES:
            raise InvalidRequest(f"{value!r} is not known", field=name, remedy=f"use one of {', '.join(ITEM_BYTES)}")


def _check_least(least: int, given: Mapping[str, float]) -> None:
    for name, value in given.items():
        if not least <= value < math.inf:
            raise InvalidRequest(f"{value:g} is not allowed", field=name, remedy=f"use {least} or more")


def _machine(gflops: float, gbytes: float, dtype: str, threads: int) -> Machine:
    if gflops > 0 and gbytes > 0:
        return Machine(gflops * 1e9, gbytes * 1e9)
    from pdserve.engine.machine import measure_machine  # torch: seconds to import

    with progress("measuring this machine"):
        found = measure_machine(dtype, threads)
    return Machine(gflops * 1e9 or found.flops, gbytes * 1e9 or found.bandwidth)


def _run(path: Path, steps: dict[str, Step], dtype: str, kv_dtype: str, threads: int) -> dict[str, float]:
    """Seconds of the faster of two runs of each step."""
    from pdserve.engine.engine import Engine
    from pdserve.engine.load import load_model
    from pdserve.engine.plan import Chunk, EngineConfig, StepPlan

    size = 16
    pages_each = -(-steps["decode"].keys // size)
    batch = steps["prefill"].batch
    with progress("loading the model"):
        loaded = load_model(path, dtype)
        config = EngineConfig(dtype=dtype, kv_dtype=kv_dtype, pages=pages_each * batch, page_size=size, threads=threads)
        engine = Engine(loaded, config)
    seconds = {}
    for name, step in steps.items():
        ids = tuple(number % loaded.spec.vocab_size for number in range(step.tokens))
        plan = StepPlan(
            tuple(
                Chunk(f"s{index}", ids, step.cached, tuple(range(index * pages_each, (index + 1) * pages_each)))
                for index in range(batch)
            )
        )
        seconds[name] = min(_timed(partial(engine.step, plan)) for _ in range(2))
    return seconds


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _table(name: str, found: Ledger, machine: Machine) -> Table:
    step = found.step
    title = f"{name}: {step.batch} x {step.tokens} tokens after {step.cached}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("operation", "shape", "times", "MFLOP each", "KiB each", "FLOP/byte", "us each", "bound by"):
        table.add_column(column, justify="left" if column in ("operation", "shape", "bound by") else "right")
    for row in found.rows:
        bound = machine.bound(row.flops, row.bytes)
        figures = ("", "", "", "", "") if not row.bytes else _figures(row.flops, row.bytes, row.intensity, bound)
        table.add_row(row.name, _shape(row.shape), str(row.times), *figures)
    return table


def _figures(flops: int, bytes_: int, intensity: float, bound: Bound) -> tuple[str, ...]:
    return (
        f"{flops / 1e6:,.2f}",
        f"{bytes_ / 1024:,.1f}",
        f"{intensity:.1f}",
        f"{bound.seconds * 1e6:,.1f}",
        bound.binds,
    )


def _summary(found: Ledger, machine: Machine, measured: float | None) -> str:
    bound = found.bound(machine)
    lines = [
        f"sum: {found.flops / 1e9:,.3f} GFLOP, {found.weight_bytes / 2**20:,.1f} MiB of weights,"
        f" {found.cache_bytes / 2**20:,.2f} MiB of KV moved, {found.intensity:.1f} FLOP/byte",
        f"cache afterwards: {found.cached_scalars:,} scalars",
        f"at least {bound.seconds * 1e3:.2f} ms (compute {bound.compute_s * 1e3:.2f},"
        f" memory {bound.memory_s * 1e3:.2f}): bound by {bound.binds}",
    ]
    if measured is not None:
        lines.append(f"measured {measured * 1e3:.2f} ms, {measured / bound.seconds:.2f} times the bound")
    return "\n".join(lines) + "\n"


def _plain(found: Ledger, machine: Machine, measured: float | None) -> dict[str, Any]:
    bound = found.bound(machine)
    return {
        "step": asdict(found.step),
        "rows": [asdict(row) | {"bytes": row.bytes, "intensity": row.intensity} for row in found.rows],
        "flops": found.flops,
        "weight_bytes": found.weight_bytes,
        "cache_bytes": found.cache_bytes,
        "cached_scalars": found.cached_scalars,
        "intensity": found.intensity,
        "machine": asdict(machine),
        "bound_s": {"compute": bound.compute_s, "memory": bound.memory_s, "binds": bound.binds},
        "measured_s": measured,
        "measured_over_bound": None if measured is None else measured / bound.seconds,
    }


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
