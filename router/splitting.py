"""Where to split a prompt that a prefill and a decode worker compute together. Pure.

The prefill worker computes the beginning, chunk by chunk, and hands it over; the decode worker computes the end. In
each layer the end reads the beginning's keys and values, so it runs one layer behind the beginning's last chunk:

    prefill   chunk | chunk | last chunk of the beginning
                              layer 0, 1, 2 ...
    decode    streams . . . .   end: layer 0, 1, 2 ...        -> first token

Both end at about the same time where the end takes as long as that last chunk. What is before it gains nothing, so
the end is at most about as long as a chunk of the prefill worker. Times are predicted as in prediction.py.

Where other prompts wait at either of the two, none is split: it would need both at once, and be overtaken at both,
while all that it could save is time of a worker that has none to spare.
"""

from __future__ import annotations

from collections.abc import Container

from cache_transfer.contract import WorkerContract
from pdserve.registry.records import SPLIT
from router.gate import Pair, computes_like
from router.prediction import PENALTY, Forecast, Pace, Site, bytes_per_token, full, pace, slowed, transfer_s, turn

LEAST = 128  # tokens that each of them computes at least: less would not pay for what two workers have to agree on
GAIN = 0.95  # of what the cheapest other way costs, at most: less gain is not worth two workers
_STEPS = 24  # places that are tried
_CHUNK = 256  # of a prefill worker that does not tell its own


def may_split(pair: Pair, here: Container[bytes]) -> bool:
    """Whether these two may compute one prompt together.

    Args:
        here: incarnations of the decode workers that may compute prompts for this request.
    """
    decode = pair.decode.record
    able = not pair.here and decode.incarnation in here and SPLIT in decode.capabilities
    return able and computes_like(pair.prefill) == computes_like(pair.decode)


def best_split(prefill: Site, decode: Site, tokens: int, contract: WorkerContract) -> tuple[Forecast | None, int]:
    """The forecast of the best place, and the tokens before it; None, 0: there is none, or no rate to find it by."""
    measured = prefill.load.prefill_tokens_per_s > 0 and decode.load.prefill_tokens_per_s > 0
    waiting = prefill.load.queued_tokens or decode.load.queued_prefill_tokens
    if not measured or waiting or full(prefill.load) or full(decode.load):
        return None, 0
    page, chunk = contract.page_size, chunk_of(prefill)
    least, most = -(-max(LEAST, decode.held + 1) // page) * page, tokens - LEAST
    step = -(-max(page, tokens // _STEPS) // page) * page
    # Full chunks of the prefill worker give the end the most time beside the last of them.
    places = [*range(least, most + 1, step), *range(prefill.held + chunk, most + 1, chunk)]
    able = [place for place in places if place >= least and not place % page]
    forecasts = [(forecast(prefill, decode, tokens, place, contract), place) for place in able]
    return min(forecasts, key=lambda each: each[0].cost_s, default=(None, 0))


def chunk_of(prefill: Site) -> int:
    """Tokens of its full step."""
    return prefill.load.chunk_tokens or _CHUNK


def forecast(prefill: Site, decode: Site, tokens: int, place: int, contract: WorkerContract) -> Forecast:
    """Of a prompt of which the prefill worker computes `place` tokens, and the decode worker the rest."""
    left, right = prefill.load, decode.load
    ours = pace(left)
    alone_s = ours.seconds(prefill.held, place - prefill.held) if place > prefill.held else 0.0
    wait_s, compute_s = turn(prefill, ours, left.queued_tokens, place, alone_s)
    compute_s += left.fixed_step_ms / 1000
    done_s = wait_s + compute_s + transfer_s(prefill, decode, place, bytes_per_token(contract), compute_s)
    rest = tokens - place
    theirs, slow = pace(right), slowed(decode)
    rest_alone_s = theirs.seconds(place, rest)
    rest_wait_s, rest_s = turn(decode, theirs.slower(slow), right.queued_prefill_tokens, rest, rest_alone_s * slow)
    begin_s = max(done_s - _last_chunk_s(ours, prefill, place), rest_wait_s)
    first_s = max(begin_s + rest_s, done_s + rest_s / max(1, len(contract.planes))) + right.decode_step_ms / 2000
    penalty_s = PENALTY * right.running * rest_alone_s
    penalty_s += alone_s * prefill.longer(place) + rest_alone_s * slow * decode.longer(rest)
    queue_s = left.queued_tokens * ours.token_s
    return Forecast(first_s, wait_s, queue_s, penalty_s)


def _last_chunk_s(ours: Pace, prefill: Site, place: int) -> float:
    fresh = max(1, place - prefill.held)
    last = (fresh - 1) % chunk_of(prefill) + 1
    return ours.seconds(place - last, last)
