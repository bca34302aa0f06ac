"""Tokens per second of the engine against `transformers`: the same weights, dtype, threads and process.

    decode    each sequence gets one token per step, greedily, after a prefill of the given length
    prefill   one prompt, in the chunks that a prefill worker uses

The two sides take turns, and the best round of each counts, so that a busy machine hits both alike.
The peer runs its plain forward pass over its own cache, with logits of the last position only.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.report import Figure, make_parser, report
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.load import find_smollm2, load_model
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from prefill_worker.settings import PrefillSettings

THREADS = 2
PAGE_SIZE = 16
CHUNK_TOKENS = PrefillSettings().chunk_tokens


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `tokens` each; `steps` decode steps, or 0 to time the prefill."""

    name: str
    batch: int
    tokens: int
    steps: int
    goal: float

    @property
    def timed_tokens(self) -> int:
        return self.batch * (self.steps or self.tokens)

    def prompts(self, vocab: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(self.tokens)
        ids = torch.randint(vocab, (self.batch, self.tokens), generator=generator)
        return [tuple(row) for row in ids.tolist()]


CASES = (
    Case("decode, batch 1 after 512 tokens", 1, 512, 32, 1.0),
    Case("decode, batch 8 after 512 tokens", 8, 512, 16, 1.5),
    Case("decode, batch 32 after 128 tokens", 32, 128, 8, 1.5),
    Case("prefill, 512 tokens", 1, 512, 0, 1.0),
    Case("prefill, 2048 tokens", 1, 2048, 0, 1.0),
)
QUICK_CASES = (
    Case("decode, batch 1 after 32 tokens", 1, 32, 4, 1.0),
    Case("decode, batch 8 after 32 tokens", 8, 32, 4, 1.5),
    Case("prefill, 64 tokens", 1, 64, 0, 1.0),
)


class Side(Protocol):
    """One of the two engines, with one case loaded."""

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Fills the cache from nothing, with logits of the last position."""
        ...

    def decode(self, steps: int) -> list[list[int]]:
        """Greedy steps from the end of the prompts, always from the same place; the ids of each step."""
        ...


class Ours:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> None:
        blocks = BlockManager(self._engine.config.pages, PAGE_SIZE)
        self._lengths = [len(ids) for ids in prompts]
        self._last: list[int] = []
        self._tables: list[tuple[int, ...]] = []
        for number, ids in enumerate(prompts):
            pages = blocks.allocate(str(number), blocks.pages_for(len(ids) + 64))
            for start in range(0, len(ids), CHUNK_TOKENS):
                chunk = Chunk("p", ids[start : start + CHUNK_TOKENS], start, pages)
                logits = self._engine.step(StepPlan((chunk,))).logits["p"]
            self._tables.append(pages)
            self._last.append(int(logits[-1].argmax()))

    def decode(self, steps: int) -> list[list[int]]:
        ids, made = self._last, []
        for step in range(steps):
            rows = zip(ids, self._lengths, self._tables, strict=True)
            chunks = tuple(Chunk(str(n), (id,), at + step, table) for n, (id, at, table) in enumerate(rows))
            logits = self._engine.step(StepPlan(chunks)).logits
            ids = [int(logits[chunk.key][-1].argmax()) for chunk in chunks]
            made.append(ids)
        return made


class Peer:
    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        self._last = self._forward(torch.tensor(prompts))

    @torch.inference_mode()
    def decode(self, steps: int) -> list[list[int]]:
        ids, made = self._last, []
        for _ in range(steps):
            ids = self._forward(ids[:, None])
            made.append(ids.tolist())
        self._cache.crop(-steps)
        return made

    def _forward(self, ids: Tensor) -> Tensor:
        output = self._model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        best: Tensor = output.logits[:, -1].argmax(-1)
        return best


def compare(case: Case, ours: Side, peer: Side | None, vocab: int, rounds: int) -> Figure:
    prompts = case.prompts(vocab)
    sides = [ours] if peer is None else [ours, peer]
    for side in sides:
        side.prefill(prompts)  # warms up, and fills the cache that decoding continues
        side.decode(1)
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for number, side in enumerate(sides):
            work: Callable[[], object] = (
                (lambda side=side: side.decode(case.steps))  # type: ignore[misc]
                if case.steps
                else (lambda side=side: side.prefill(prompts))  # type: ignore[misc]
            )
            started = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - started)
    rates = [case.timed_tokens / seconds for seconds in best]
    if peer is None:
        return Figure(case.name, rates[0], "tokens/s")
    return Figure(case.name, rates[0], "tokens/s", rates[1], case.goal)


def load_peer(path: Path) -> Any | None:
    """The same checkpoint in `transformers`, with plain bf16 weights; None when that is not installed."""
    try:
        from transformers import AutoModelForCausalLM, GgufConfig
    except ImportError:
        return None
    where, more = path, {}
    if path.is_file():
        where, more = path.parent, {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, local_files_only=True, **more).eval()
    if {parameter.dtype for parameter in model.parameters()} != {torch.bfloat16}:
        raise SystemExit("the peer's weights are not in bf16: the comparison would not be fair")
    return model


def tiny_checkpoint(folder: Path, layers: int = 4, kv_heads: int = 2, head_dim: int = 16) -> Path:
    """A small random Llama, for --quick."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure(path: Path, cases: Sequence[Case], rounds: int) -> list[Figure]:
    need = max(case.batch * -(-(case.tokens + 64) // PAGE_SIZE) for case in cases)
    config = EngineConfig(dtype="bf16", pages=need, page_size=PAGE_SIZE, threads=THREADS)
    engine = Engine(load_model(path, "bf16"), config)
    model = load_peer(path)
    figures = []
    for case in cases:
        print(f"measuring {case.name}", file=sys.stderr, flush=True)
        peer = None if model is None else Peer(model)
        figures.append(compare(case, Ours(engine), peer, engine.spec.vocab_size, rounds))
    return figures


def main() -> None:
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(THREADS)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(tiny_checkpoint(Path(folder)), QUICK_CASES, rounds=2)
    else:
        figures = measure(find_smollm2(), CASES, rounds=3)
    report(figures, options.json)


if __name__ == "__main__":
    main()
