"""vLLM as its library runs it: `python -m benchmarks.peers.vllm_library_side MODEL MAX_TOKENS`, in its own environment.

`LLM.generate` with its defaults: the engine is a second process, and each token crosses to this one. A decode
time is that of a longer generation less that of the fastest one-token one: a slow one would flatter it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.talk import Command, serve


class Side:
    def __init__(self, model: str, max_tokens: int) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model,
            dtype="bfloat16",
            max_model_len=max_tokens,
            max_num_batched_tokens=4096,
            max_num_seqs=32,
            enable_prefix_caching=False,
        )
        self._prompts: Sequence[Sequence[int]] = ()
        self._short_s = 0.0  # the fastest generation of one token each

    def prefill(self, prompts: Sequence[Sequence[int]]) -> float:
        return self._generate(prompts, 1)

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = prompts
        self._generate(prompts, 4)
        self._short_s = min(self._generate(prompts, 1) for _ in range(2))

    def decode(self, steps: int) -> float:
        """Always from the end of the prompts."""
        self._short_s = min(self._short_s, self._generate(self._prompts, 1))
        return self._generate(self._prompts, 1 + steps) - self._short_s

    def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        began = time.perf_counter()
        self._llm.generate(given, parameters, use_tqdm=False)
        return time.perf_counter() - began


def load() -> Mapping[str, Command]:
    side = Side(sys.argv[1], int(sys.argv[2]))
    return {"prefill": side.prefill, "fill": side.fill, "decode": side.decode}


if __name__ == "__main__":
    serve(load)
