"""When a prompt's first token would come, by a handoff and computed at the decode worker. Pure.

    by handoff   wait for the prefill worker + its prefill + what of the transfer it does not hide + half a decode step
    at decode    wait for the prompts there + prefill beside the streams there

in seconds, from what workers measure and publish. The choice adds to both what they cost others, in seconds of a
first token:

    longer prompts at the worker wait for this one, which is shorter and goes first: its whole prefill, for each
    streams at the decode worker stand still while it computes: a tenth of that for each, since every step of
    theirs stays within the worker's own limit (decode.step_ms)

*Prefill.* A token costs its part of a full step, and something for each token before it that it reads; a worker of
an older version tells one rate for both. A prompt pays for one more step's fixed cost, and for a third more than
itself where others wait: a quarter of each step belongs to those who have waited longest.

*Waiting.* Half of the step that runs now. Then, as workers compute the shortest prompt first, for those that are not
longer, as far as this router knows them as its own, for all of the others' tokens, and for that third more.

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
PENALTY = 0.1  # of a stream's standing still, against the same time of waiting for a first token
SHARED = 4 / 3  # of a prompt's tokens are computed before it is done, where others wait
_TAIL_TOKENS = 256  # whose cache can only travel once all is computed
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "float64": 8}


@dataclass(frozen=True)
class Site:
    """A worker as a prompt would find it."""

    load: Load
    prompts: tuple[int, ...]  # tokens of each prompt that this router has there
    held: int = 0  # tokens of the prompt that it probably has

    @property
    def running_s(self) -> float:
        """Expected rest of the step that runs there."""
        return self.load.step_ms / 2000

    def longer(self, tokens: int) -> int:
        """Prompts there that a shorter one makes wait. Those that are done by now count no more."""
        return sum(size > tokens for size in self.prompts) if self.load.queued_prefill_tokens else 0


@dataclass(frozen=True)
class Pace:
    """What a prompt's tokens cost at one worker."""

    token_s: float
    pair_s: float = 0.0

    def seconds(self, start: int, tokens: int) -> float:
        """Of `tokens` after `start` that are there; each reads itself and all before it."""
        return tokens * (self.token_s + self.pair_s * (start + (tokens + 1) / 2))

    def slower(self, times: float) -> Pace:
        return Pace(self.token_s * times, self.pair_s * times)


@dataclass(frozen=True)
class Forecast:
    """Seconds from now."""

    first_token_s: float
    wait_s: float = 0.0  # of it, for others' prompts
    queue_s: float = 0.0  # to compute all that waits there, longer prompts too
    penalty_s: float = 0.0  # to others, as if it were this request's own time
    measured: bool = True  # from rates, not from guesses

    @property
    def cost_s(self) -> float:
        return self.first_token_s + self.penalty_s


def pace(load: Load, otherwise: float = 0.0) -> Pace:
    """Of a prompt that has the worker to itself.

    Args:
        otherwise: tokens per second of a worker that has no rate; 0: unknown, too.
    """
    if load.prefill_tokens_per_s and load.prefill_token_us:
        return Pace(load.prefill_token_us / 1e6, load.prefill_pair_ns / 1e9)
    return Pace(1 / (load.prefill_tokens_per_s or otherwise or COLD_TOKENS_PER_S))


def ahead(queued: int, own: Iterable[int], tokens: int) -> float:
    """Tokens that a worker computes before a prompt of `tokens` that comes now.

    Args:
        queued: tokens it has still to compute.
        own: sizes of those prompts among them that are known.
    """
    own = tuple(own)
    shorter = sum(size for size in own if size <= tokens) + max(0, queued - sum(own))
    return min(shorter * SHARED, queued)


def by_handoff(prefill: Site, decode: Site, tokens: int, bytes_per_token: int) -> Forecast:
    """Infinite where a queue is full."""
    load = prefill.load
    its_pace = pace(load, decode.load.prefill_tokens_per_s)
    alone_s = its_pace.seconds(prefill.held, tokens - prefill.held)
    wait_s, compute_s = turn(prefill, its_pace, load.queued_tokens, tokens, alone_s)
    compute_s += load.fixed_step_ms / 1000
    first_s = wait_s + compute_s + transfer_s(prefill, decode, tokens, bytes_per_token, compute_s)
    first_s += max(decode.load.decode_step_ms / 2000, decode.running_s)
    if full(prefill.load) or full(decode.load):
        first_s = float("inf")
    queue_s = load.queued_tokens * its_pace.token_s
    penalty_s = alone_s * prefill.longer(tokens)
    return Forecast(first_s, wait_s, queue_s, penalty_s, measured=load.prefill_tokens_per_s > 0)


def at_decode(decode: Site, tokens: int, prefill_tokens_per_s: float = 0.0) -> Forecast:
    """Infinite where the queue is full.

    Args:
        prefill_tokens_per_s: of a prefill worker, for a decode worker without a rate.
    """
    load = decode.load
    its_pace = pace(load, prefill_tokens_per_s)
    alone_s = its_pace.seconds(decode.held, tokens - decode.held)
    penalty_s = PENALTY * load.running * alone_s
    times = slowed(decode)
    its_pace, alone_s = its_pace.slower(times), alone_s * times
    wait_s, compute_s = turn(decode, its_pace, load.queued_prefill_tokens, tokens, alone_s)
    penalty_s += alone_s * decode.longer(tokens)
    first_s = float("inf") if full(load) else wait_s + compute_s + load.fixed_step_ms / 1000
    queue_s = load.queued_prefill_tokens * its_pace.token_s
    return Forecast(first_s, wait_s, queue_s, penalty_s, measured=load.prefill_tokens_per_s > 0)


def slowed(decode: Site) -> float:
    """How many times as long a prompt takes beside the streams that are there."""
    load = decode.load
    if not load.running:
        return 1.0
    rate, told = load.prefill_tokens_per_s, load.shared_prefill_tokens_per_s
    return max(1.0, rate / told) if rate and told else 2.0


def transfer_s(prefill: Site, decode: Site, tokens: int, bytes_per_token: int, compute_s: float) -> float:
    """Of a handoff of `tokens`, what its computing does not hide."""
    bandwidth = prefill.load.transfer_bytes_per_s or COLD_BYTES_PER_S
    travelling = (tokens - decode.held) * bytes_per_token
    tail = min(tokens - decode.held, _TAIL_TOKENS) * bytes_per_token
    return max(travelling / bandwidth - compute_s, tail / bandwidth)


def bytes_per_token(contract: WorkerContract) -> int:
    """Of the cache that travels."""
    scalars = sum(plane.heads * plane.head_dim for layer in contract.planes for plane in layer)
    return scalars * _ITEM_BYTES.get(contract.kv_dtype, 4)


def turn(site: Site, its_pace: Pace, queued: int, tokens: int, alone_s: float) -> tuple[float, float]:
    """Seconds until a prompt begins, and from there on until it is computed."""
    before = ahead(queued, site.prompts, tokens)
    # They are about as long as the prompt itself: what their tokens read is taken for what its own do.
    wait_s = site.running_s + before * its_pace.seconds(0, tokens) / tokens
    others = queued > before  # who stay, and take part in its steps
    return wait_s, min(alone_s * SHARED, alone_s + (queued - before) * its_pace.token_s) if others else alone_s


def full(load: Load) -> bool:
    return bool(load.waiting_limit) and load.waiting >= load.waiting_limit
