"""vLLM as a peer: `python -m benchmarks.peers.vllm_side MODEL MAX_TOKENS`, in vLLM's own environment.

The engine runs in this process, without the server and without the pipe to an engine core, so what is
timed is its steps alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.talk import Command, serve


class Side:
    def __init__(self, model: str, max_tokens: int) -> None:
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=max_tokens,
            max_num_batched_tokens=4096,
            max_num_seqs=32,
            enable_prefix_caching=False,
        )
        self._max_tokens = max_tokens
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._made: dict[str, int] = {}  # running request -> tokens made so far
        self._count = 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> float:
        """Seconds until each prompt has its first token; what ran before is dropped."""
        self._drop()
        began = time.perf_counter()
        self._add(prompts, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - began

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prompts that `decode` goes on with."""
        self._drop()
        self._made = self._add(prompts, self._max_tokens - max(map(len, prompts)))
        self._until(1)

    def decode(self, steps: int) -> float:
        """Seconds of `steps` further tokens of each sequence."""
        have = max(self._made.values())
        self._until(have)
        began = time.perf_counter()
        self._until(have + steps)
        return time.perf_counter() - began

    def _until(self, tokens: int) -> None:
        while min(self._made.values()) < tokens:
            for output in self._engine.step():
                self._made[output.request_id] = len(output.outputs[0].token_ids)

    def _add(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, int]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        made = {}
        for ids in prompts:
            self._count += 1
            self._engine.add_request(str(self._count), {"prompt_token_ids": list(ids)}, parameters)
            made[str(self._count)] = 0
        return made

    def _drop(self) -> None:
        self._engine.abort_request(list(self._made))
        self._made = {}
        while self._engine.has_unfinished_requests():
            self._engine.step()


def load() -> Mapping[str, Command]:
    side = Side(sys.argv[1], int(sys.argv[2]))
    return {"prefill": side.prefill, "fill": side.fill, "decode": side.decode}


if __name__ == "__main__":
    serve(load)
