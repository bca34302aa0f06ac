"""vLLM as its library runs it: `python -m benchmarks.peers.vllm_library_side MODEL MAX_TOKENS`, in its own environment.

`LLM.generate` with its defaults, but that the engine notes the times of tokens: it is a second process, and each token
crosses to this one. A decode time is from the first tokens of all sequences to the last ones, by the engine's notes.
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
            disable_log_stats=False,
        )
        self._prompts: Sequence[Sequence[int]] = ()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> float:
        began = time.perf_counter()
        self._generate(prompts, 1)
        return time.perf_counter() - began

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = prompts
        self._generate(prompts, 4)

    def decode(self, steps: int) -> float:
        """Always from the end of the prompts."""
        notes = [output.metrics for output in self._generate(self._prompts, 1 + steps)]
        first: float = max(seen.first_token_ts for seen in notes)
        last: float = max(seen.last_token_ts for seen in notes)
        return last - first

    def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Any]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        made: list[Any] = self._llm.generate(given, parameters, use_tqdm=False)
        return made


def load() -> Mapping[str, Command]:
    side = Side(sys.argv[1], int(sys.argv[2]))
    return {"prefill": side.prefill, "fill": side.fill, "decode": side.decode}


if __name__ == "__main__":
    serve(load)
