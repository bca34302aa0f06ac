"""What one core can do at best with the prompts of `benchmarks.serving`: the ledger's bound on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figure
from benchmarks.serving_ideal import ideals
from benchmarks.workloads import Interference, Poisson
from pdserve.engine.ledger import Step, ledger
from pdserve.engine.spec import ModelSpec

DTYPE = "bf16"
BLOCK = 32  # queries; each is held to see the whole of its own block, as kernels compute it


def bounds(model: str | Path, rates: Sequence[float], seeds: Sequence[int], cores: int) -> list[Figure]:
    """The longest prompt of each workload, alone on one core, beside the time that there is for it; then what ideal
    systems make of the Poisson arrivals. A second's work, to be done when nothing is measured.
    """
    # torch takes seconds to import, and the load generator has no use for it.
    from pdserve.engine.machine import measure_machine
    from pdserve.engine.packaged import model_path
    from pdserve.engine.spec_file import read_spec

    spec, machine = read_spec(model_path(str(model))), measure_machine(DTYPE, threads=1)
    figures = []
    for tokens, title, limit_s in (
        (Interference.long[0], "the interval at which they arrive", Interference.every_s),
        (max(Poisson.prompts), "the objective", Poisson.first_token_s),
    ):
        seconds = causal_flops(spec, tokens) / machine.flops
        figures.append(Figure(f"bound: {tokens:,} tokens on one core at its peak, over {title}", seconds, "s", limit_s))
    work_s = {tokens: causal_flops(spec, tokens) / machine.flops for tokens in Poisson.prompts}
    return figures + ideals(rates, seeds, work_s, cores)


def causal_flops(spec: ModelSpec, tokens: int) -> int:
    """Of a whole prompt and the logits after it. One step of the ledger lets every query see every key."""
    flops = 0
    for start in range(0, tokens, BLOCK):
        block = ledger(spec, Step(1, min(BLOCK, tokens - start), start), DTYPE)
        flops += block.flops - block.row("logits").flops
    return flops + ledger(spec, Step(1, 1), DTYPE).row("logits").flops
