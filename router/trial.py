"""One attempt of a request, as its record tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pdserve.errors import PdserveError
from pdserve.rpc.events import AttemptRecord
from router.gate import Pair
from router.wire import PrefillReport


def ms(start: float, end: float) -> float:
    """Between two times; 0 while the second has not come."""
    return 1000 * (end - start) if end else 0.0


@dataclass
class Trial:
    """One attempt that was begun. Mutable, part of an account; times are monotonic seconds, 0: not yet."""

    pair: Pair
    first_index: int  # output tokens there were before it
    begun: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    output_tokens: int = 0
    outcome: str = ""
    failed_worker: str = ""
    error: PdserveError | None = None  # that ended it
    report: PrefillReport | None = None
    computed_at_decode: int = 0  # tokens, of a split prompt

    def record(self, received: float) -> AttemptRecord:
        r, choice = self.report or NO_REPORT, self.pair.choice
        return AttemptRecord(
            prefill_worker=self.pair.prefill.id,
            decode_worker=self.pair.decode.id,
            prefill_candidates=choice.prefill_candidates,
            decode_candidates=choice.decode_candidates,
            prefill_cost=choice.prefill_cost,
            decode_cost=choice.decode_cost,
            outcome=self.outcome,
            failed_worker=self.failed_worker,
            first_index=self.first_index,
            output_tokens=self.output_tokens,
            begun_ms=ms(received, self.begun),
            admitted_ms=ms(self.begun, self.admitted_at),
            first_token_ms=ms(self.begun, self.first_token_at),
            total_ms=ms(self.begun, self.ended_at),
            computed_tokens=r.computed_tokens,
            sent_tokens=r.sent_tokens,
            bytes_sent=r.bytes_sent,
            frames_sent=r.frames_sent,
            queued_ms=r.queued_ms,
            prefill_ms=r.prefill_ms,
            push_ms=r.push_ms,
            transfer_ms=r.transfer_ms,
            placement=self.pair.placement,
            placement_reason=choice.reason,
            predicted_handoff_ms=1000 * choice.handoff_s,
            predicted_decode_ms=1000 * choice.here_s,
            decode_penalty_ms=1000 * choice.penalty_s,
            predicted_split_ms=1000 * choice.split_s,
            handoff_tokens=self.pair.handoff_tokens,
        )


NO_REPORT = PrefillReport(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
