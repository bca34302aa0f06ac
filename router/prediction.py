"""When a prompt's first token would come, by a handoff and computed at the decode worker. Pure.

    by handoff   wait for the prefill worker + its prefill + what of the transfer it does not hide + a decode step
    at decode    wait for the prompts there + prefill beside the streams there

where a prefill counts one step's fixed cost besides its tokens,

in seconds, from the rates that workers measure and publish. The choice adds to the second what it costs others: the
streams there stand still while the prompt computes, which counts a quarter of a second of a first token per stream
and second, since each of their steps stays within the worker's own limit (decode.step_ms).

*Waiting.* Workers compute the shortest prompt first, so a prompt waits for those that are not longer, as far as this
router knows them as its own, for all of the others' tokens, and for a third more: the part of each step that belongs
to those who have waited longest.

*Cold start.* While a prefill worker has no rate, prompts are handed over, as in mode `always`. A decode worker that
has computed no prompt yet is held to be as fast as the prefill worker, halved while it has streams; what else is not
known is taken for 500 tokens/s and half a gigabyte per second. Such a prediction is marked, and no statistics are made
of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache_transfer.contract import WorkerContract
from pdserve.registry.records import Load

COLD_TOKENS_PER_S = 500.0
COLD_BYTES_PER_S = 5e8
PENALTY = 0.25  # of a stream's standing still, against the same time of waiting for a first token
_TAIL_TOKENS = 256  # whose cache can only travel once all is computed
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "float64": 8}


@dataclass(frozen=True)
class Site:
    """A worker as a prompt would find it."""

    load: Load
    prompts: tuple[int, ...]  # tokens of each prompt that this router has there
    held: int = 0  # tokens of the prompt that it probably has


@dataclass(frozen=True)
class Forecast:
    """Seconds from now."""

    first_token_s: float
    penalty_s: float = 0.0  # to others, as if it were this request's own time
    measured: bool = True  # from rates, not from guesses

    @property
    def cost_s(self) -> float:
        return self.first_token_s + self.penalty_s


def ahead(queued: int, own: Iterable[int], tokens: int) -> float:
    """Tokens that a worker computes before a prompt of `tokens` that comes now.

    Args:
        queued: tokens it has still to compute.
        own: sizes of those prompts among them that are known.
    """
    own = tuple(own)
    shorter = sum(size for size in own if size <= tokens) + max(0, queued - sum(own))
    return min(shorter * 4 / 3, queued)


def by_handoff(prefill: Site, decode: Site, tokens: int, bytes_per_token: int) -> Forecast:
    """Infinite where a queue is full."""
    if _full(prefill.load) or _full(decode.load):
        return Forecast(float("inf"))
    rate = prefill.load.prefill_tokens_per_s
    speed = rate or decode.load.prefill_tokens_per_s or COLD_TOKENS_PER_S
    compute_s = (tokens - prefill.held) / speed + prefill.load.fixed_step_ms / 1000
    bandwidth = prefill.load.transfer_bytes_per_s or COLD_BYTES_PER_S
    travelling = (tokens - decode.held) * bytes_per_token
    tail = min(tokens - decode.held, _TAIL_TOKENS) * bytes_per_token
    transfer_s = max(travelling / bandwidth - compute_s, tail / bandwidth)
    wait_s = ahead(prefill.load.queued_tokens, prefill.prompts, tokens) / speed
    step_s = decode.load.decode_step_ms / 1000
    return Forecast(wait_s + compute_s + transfer_s + step_s, measured=rate > 0)


def at_decode(decode: Site, tokens: int, prefill_tokens_per_s: float = 0.0) -> Forecast:
    """Infinite where the queue is full.

    Args:
        prefill_tokens_per_s: of a prefill worker, for a decode worker without a rate.
    """
    load = decode.load
    if _full(load):
        return Forecast(float("inf"))
    alone = load.prefill_tokens_per_s or prefill_tokens_per_s or COLD_TOKENS_PER_S
    speed = alone
    if load.running:
        # What it tells of its streams may be older than they are.
        told = load.shared_prefill_tokens_per_s if load.decode_step_ms else 0.0
        speed = told or alone / 2
    missing = tokens - decode.held
    wait_s = ahead(load.queued_prefill_tokens, decode.prompts, tokens) / speed
    penalty_s = PENALTY * load.running * missing / alone
    first_s = wait_s + missing / speed + load.fixed_step_ms / 1000
    return Forecast(first_s, penalty_s, measured=load.prefill_tokens_per_s > 0)


def bytes_per_token(contract: WorkerContract) -> int:
    """Of the cache that travels."""
    scalars = sum(plane.heads * plane.head_dim for layer in contract.planes for plane in layer)
    return scalars * _ITEM_BYTES.get(contract.kv_dtype, 4)


def _full(load: Load) -> bool:
    return bool(load.waiting_limit) and load.waiting >= load.waiting_limit
