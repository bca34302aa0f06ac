"""llama.cpp as a peer: `python -m benchmarks.peers.llamacpp_side FILE.gguf MAX_TOKENS THREADS`, in its own environment.

One sequence. The weights are computed with as the file stores them, quantized.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.talk import Command, serve


class Side:
    def __init__(self, file: str, max_tokens: int, threads: int) -> None:
        from llama_cpp import Llama

        self._model: Any = Llama(
            file, n_ctx=max_tokens, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> float:
        self._model.reset()
        (ids,) = prompts
        began = time.perf_counter()
        self._model.eval(list(ids))
        return time.perf_counter() - began

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prefill(prompts)
        self._model.eval([1])

    def decode(self, steps: int) -> float:
        """Seconds of `steps` steps. The ids are given, so its sampling costs nothing here."""
        began = time.perf_counter()
        for step in range(steps):
            self._model.eval([1000 + step])
        return time.perf_counter() - began


def load() -> Mapping[str, Command]:
    side = Side(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    return {"prefill": side.prefill, "fill": side.fill, "decode": side.decode}


if __name__ == "__main__":
    serve(load)
