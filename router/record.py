"""The running account of one request, which becomes its handoff record and one log line."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field, replace

from pdserve.errors import FieldDifference, PdserveError
from pdserve.rpc.events import Finish, HandoffRecord, TokenBatch
from router.gate import Member, Pair
from router.placement import room
from router.request import Request
from router.wire import PrefillReport

log = logging.getLogger(__name__)

_MAX_NOTES = 32
_MIXED_MODES = "prefill and decode differ in deterministic mode; results may differ in the last bits"


@dataclass
class Account:
    """Mutable; owned by the request's orchestration task."""

    request: Request
    attempts: int = 0
    tried: set[tuple[bytes, bytes]] = field(default_factory=set)  # Pair.key
    blamed: set[bytes] = field(default_factory=set)  # incarnations that failed this request
    notes: list[str] = field(default_factory=list)
    last_error: PdserveError | None = None
    accepted: bool = False  # the client knows its request was taken
    max_tokens: int = 0  # of the last decode stream
    output_tokens: int = 0
    report: PrefillReport | None = None
    conversions: tuple[FieldDifference, ...] = ()
    prefill_worker: str = ""
    decode_worker: str = ""
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def started(self) -> bool:
        """The client has (or is about to have) tokens: no other worker can take over yet."""
        return self.output_tokens > 0

    def attempt(self, pair: Pair) -> None:
        self.attempts += 1
        self.tried.add(pair.key)
        self.prefill_worker, self.decode_worker = pair.prefill.id, pair.decode.id
        self.conversions = pair.conversions
        prefill, decode = (m.record.contract.info.get("deterministic", "false") for m in (pair.prefill, pair.decode))
        if prefill != decode and _MIXED_MODES not in self.notes:
            self.note(_MIXED_MODES)

    def fitted(self, pair: Pair) -> Request:
        """The request with the output limit that this pair has room for."""
        left = room(pair).total - len(self.request.prompt_ids)
        self.max_tokens = min(self.request.max_tokens, left)
        if self.max_tokens == self.request.max_tokens:
            return self.request
        cut = f"max_tokens cut from {self.request.max_tokens} to {self.max_tokens}"
        self.note(f"{cut}, the room of {pair.prefill.id} and {pair.decode.id}")
        return replace(self.request, sampling=replace(self.request.sampling, max_tokens=self.max_tokens))

    def failed(self, member: Member, error: PdserveError) -> None:
        self.last_error = error
        self.blamed.add(member.record.incarnation)
        self.note(f"attempt {self.attempts} failed at {member.record.role} worker {member.id}: {error.reason}: {error}")

    def note(self, text: str) -> None:
        """Bounded: the first ones tell the story."""
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)

    def tokens(self, batch: TokenBatch) -> None:
        self.last_token_at = time.monotonic()
        if not self.started:
            self.first_token_at = self.last_token_at
        self.output_tokens += len(batch.ids)

    def finish(self, finish: Finish) -> Finish:
        """The finish with the prefill worker's cache hits, which decode cannot know."""
        if self.report is None:
            return finish
        cached = max(0, len(self.request.prompt_ids) - self.report.computed_tokens)
        return replace(finish, usage=replace(finish.usage, cached_prompt_tokens=cached))

    def record(self) -> HandoffRecord:
        r = self.report or PrefillReport(0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        decode_s = self.last_token_at - self.first_token_at
        return HandoffRecord(
            request_id=self.request.id,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            attempts=self.attempts,
            prompt_tokens=len(self.request.prompt_ids),
            computed_tokens=r.computed_tokens,
            sent_tokens=r.sent_tokens,
            bytes_sent=r.bytes_sent,
            frames_sent=r.frames_sent,
            queued_ms=r.queued_ms,
            prefill_ms=r.prefill_ms,
            transfer_ms=r.transfer_ms,
            first_token_ms=(self.first_token_at - self.request.received) * 1000 if self.started else 0.0,
            decode_tokens_per_s=(self.output_tokens - 1) / decode_s if decode_s > 0 else 0.0,
            conversions=self.conversions,
            notes=(*self.request.notes, *self.notes),
        )

    def log(self, outcome: str) -> None:
        """One structured line per request; `outcome` is a finish reason or an error's reason."""
        line = {"outcome": outcome, "label": self.request.label, "output_tokens": self.output_tokens}
        log.info("request %s", json.dumps(line | asdict(self.record())))
