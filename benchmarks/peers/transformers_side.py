"""`transformers` as a peer: `python -m benchmarks.peers.transformers_side MODEL THREADS`, in pdserve's own environment.

Its plain forward pass over its own cache, with logits of the last position only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.talk import Command, serve


class Side:
    def __init__(self, model: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = load_model(model)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> float:
        from transformers import DynamicCache

        began = time.perf_counter()
        self._cache = DynamicCache(config=self._model.config)
        self._last = self._forward(torch.tensor(prompts))
        return time.perf_counter() - began

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prefill(prompts)
        self.decode(1)

    @torch.inference_mode()
    def decode(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self._last = self._forward(self._last[:, None])
        return time.perf_counter() - began

    def _forward(self, ids: Tensor) -> Tensor:
        output = self._model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        best: Tensor = output.logits[:, -1].argmax(-1)
        return best


def load_model(path: Path) -> Any:
    """In bf16, a GGUF file's weights dequantized. Raises SystemExit when they are not."""
    from transformers import AutoModelForCausalLM, GgufConfig

    where, more = path, {}
    if path.is_file():
        where, more = path.parent, {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, local_files_only=True, **more).eval()
    if {parameter.dtype for parameter in model.parameters()} != {torch.bfloat16}:
        raise SystemExit("the peer's weights are not in bf16: the comparison would not be fair")
    return model


def load() -> Mapping[str, Command]:
    side = Side(Path(sys.argv[1]), int(sys.argv[2]))
    return {"prefill": side.prefill, "fill": side.fill, "decode": side.decode}


if __name__ == "__main__":
    serve(load)
