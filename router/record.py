"""The running account of one request, which becomes its handoff record and one log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from cache_transfer.contract import Ticket
from pdserve.errors import FieldDifference, PdserveError
from pdserve.rpc.events import Finish, GroupPair, HandoffRecord, Prefilled, TokenBatch
from pdserve.telemetry.logs import Told, quoteless
from pdserve.telemetry.traces import OFF, Traces
from router.gate import Member, Pair, Verdict, computes_like
from router.outcomes import Outcomes
from router.placement import room
from router.request import OpenChoice, Request
from router.tracing import RequestTrace
from router.trial import NO_REPORT, Trial, ms
from router.wire import PrefillReport

log = logging.getLogger(__name__)

_MAX_NOTES = 32
_MAX_GROUPS = 32
_MAX_HISTORY = 64
_IDS_OF_A_GROUP = 8
_MIXED_MODES = "prefill and decode differ in deterministic mode; results may differ in the last bits"


@dataclass
class Output:
    """One choice as far as the client has it, or is about to. Mutable."""

    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    at: float = 0.0  # monotonic seconds of its last tokens


@dataclass
class Account:
    """Mutable; owned by the request's orchestration task."""

    request: Request
    taken: float = field(default_factory=time.monotonic)  # checked and tokenized
    verdict: Verdict | None = None  # the gate's, when the last pair was looked for
    trials: list[Trial] = field(default_factory=list)
    attempts: int = 0
    tried: set[tuple[bytes, bytes]] = field(default_factory=set)  # Pair.key
    blamed: set[bytes] = field(default_factory=set)  # incarnations that failed this request
    notes: list[str] = field(default_factory=list)
    last_error: PdserveError | None = None
    accepted: bool = False  # the client knows its request was taken
    max_tokens: int = 0  # of the last decode stream
    promised: int = 0  # max_tokens of the last decode stream that gave tokens
    outputs: list[Output] = field(init=False)  # by choice
    cached_tokens: int = 0  # prompt tokens that prefill had, before the first token
    admitted_at: float = 0.0
    began_on: Pair | None = None  # the pair that gave the first token
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended_at: float = 0.0
    outcome: str = "INTERNAL"  # until it is known
    error: PdserveError | None = None  # that ended it
    outcomes: Outcomes = field(default_factory=Outcomes)  # of all requests
    traces: Traces = OFF
    trace: RequestTrace = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = [Output() for _ in range(self.request.n)]
        self._gaps = self.outcomes.traffic.inter_token_s.of(self.request.model)
        self.trace = RequestTrace(self.traces, self.request)

    @property
    def started(self) -> bool:
        """Another attempt has to go on after the tokens there are."""
        return self.output_tokens > 0

    @property
    def complete(self) -> bool:
        return all(output.finish is not None for output in self.outputs)

    @property
    def output_tokens(self) -> int:
        """Of all choices."""
        return sum(len(output.ids) for output in self.outputs)

    @property
    def prefilled_output(self) -> int:
        """Output tokens that the next attempt's handoff brings. Those of several choices are computed at decode."""
        return len(self.outputs[0].ids) if self.request.n == 1 else 0

    @property
    def limit(self) -> int:
        """Output tokens wanted. Once there are some it never grows: text held back was let go at the old end."""
        return self.promised or self.request.max_tokens

    @property
    def least_tokens(self) -> int:
        """The smallest limit that a pair may cut the output to."""
        longest = max((len(output.ids) for output in self.outputs if output.finish is None), default=0)
        return min(self.limit, max(self.request.least_tokens, longest + 1))

    @property
    def prefill_tokens(self) -> int:
        """What the next attempt has to prefill, if any token is left to sample."""
        return len(self.request.prompt_ids) + min(self.prefilled_output, self.limit - 1)

    def attempt(self, pair: Pair) -> None:
        self.attempts += 1
        self.tried.add(pair.key)
        self.trials.append(Trial(pair, self.output_tokens))
        self.outcomes.begun(pair)
        self.outcomes.traffic.resumes += self.started
        self.trace.attempt(self.attempts, self.trials[-1])
        prefill, decode = (m.record.contract.info.get("deterministic", "false") for m in (pair.prefill, pair.decode))
        if prefill != decode and _MIXED_MODES not in self.notes:
            self.note(_MIXED_MODES)
        if self.began_on is not None and ways(self.began_on) != ways(pair):
            self.note("the answer goes on in another precision or mode: the rest of it may be another one")

    def fitted(self, pair: Pair) -> Request:
        """The request as this pair gets it: with the output so far, and the output limit it has room for."""
        left = room(pair).total - len(self.request.prompt_ids)
        self.max_tokens = min(self.limit, left)
        request = self._going_on()
        if self.max_tokens == self.request.max_tokens:
            return request
        cut = f"max_tokens cut from {self.request.max_tokens} to {self.max_tokens}"
        self.note(f"{cut}, the room of {pair.prefill.id} and {pair.decode.id}")
        return replace(request, sampling=replace(request.sampling, max_tokens=self.max_tokens))

    def _going_on(self) -> Request:
        if self.request.n == 1:
            return replace(self.request, output_ids=tuple(self.outputs[0].ids))
        left = ((number, output) for number, output in enumerate(self.outputs) if output.finish is None)
        return replace(self.request, choices=tuple(OpenChoice(number, tuple(output.ids)) for number, output in left))

    def admitted(self, ticket: Ticket | None) -> None:
        """Decode takes the last attempt; without a ticket it computes the prompt itself."""
        self.trace.admitted(b"" if ticket is None else ticket.handoff_id)
        self.trials[-1].admitted_at = time.monotonic()
        self.admitted_at = self.admitted_at or self.trials[-1].admitted_at

    def failed(self, member: Member, error: PdserveError) -> None:
        self._end_trial(error.reason, member.id)
        self.outcomes.traffic.failures.add(member.record.role, error.reason)
        self.trials[-1].error = self.last_error = error
        self.trace.failed()
        self.blamed.add(member.record.incarnation)
        where = f"{member.record.role} worker {member.id}"
        self.note(f"attempt {self.attempts} failed at {where}: {error.reason}: {quoteless(error)}")

    def note(self, text: str) -> None:
        """Bounded: the first ones tell the story."""
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)

    def tokens(self, batch: TokenBatch) -> None:
        trial, self.last_token_at = self.trials[-1], time.monotonic()
        if not self.first_token_at:
            self.first_token_at = self.last_token_at
            since_s = self.first_token_at - self.request.received
            self.outcomes.traffic.first_token_s.of(self.request.model).observe(since_s)
        if not trial.output_tokens:
            # What failed before these tokens may do for those that follow.
            self.tried = {trial.pair.key}
            self.began_on = self.began_on or trial.pair
            trial.first_token_at, trial.outcome, trial.failed_worker = self.last_token_at, "", ""
            trial.error = None
            self.outcomes.first_token(trial.pair, trial.first_token_at - trial.begun)
        output, count = self.outputs[batch.choice], len(batch.ids)
        if output.at:
            self._gaps.observe((self.last_token_at - output.at) / count, count)
        output.at = self.last_token_at
        output.ids += batch.ids
        trial.output_tokens += count
        self.promised = self.max_tokens

    def reported(self, report: PrefillReport) -> None:
        """Takes the prefill worker's figures. Only those for the first token tell what the prompt itself cost."""
        trial = self.trials[-1]
        trial.report = report = replace(report, computed_tokens=report.computed_tokens + trial.computed_at_decode)
        if not trial.first_index:
            self.cached_tokens = max(0, len(self.request.prompt_ids) - report.computed_tokens)

    def computed(self, prefilled: Prefilled) -> None:
        """Takes the figures of a decode worker that computed the prompt itself, or (the prefill worker's follow) its
        end.
        """
        if self.trials[-1].pair.split:
            self.trials[-1].computed_at_decode = prefilled.computed_tokens
            return
        report = replace(
            NO_REPORT,
            computed_tokens=prefilled.computed_tokens,
            cached_tokens=prefilled.cached_tokens,
            queued_ms=prefilled.queued_ms,
            prefill_ms=prefilled.prefill_ms,
        )
        self.reported(report)

    def end(self, outcome: str, error: PdserveError | None = None) -> None:
        """`outcome` is a finish reason or an error's reason. The last word counts."""
        self.outcome, self.ended_at, self.error = outcome, time.monotonic(), error
        if self.trials and not self.trials[-1].outcome:
            self._end_trial(outcome)

    def _end_trial(self, outcome: str, failed_worker: str = "") -> None:
        trial = self.trials[-1]
        trial.outcome, trial.failed_worker, trial.ended_at = outcome, failed_worker, time.monotonic()

    def ended(self, finish: Finish) -> None:
        """One choice has come to its end."""
        self.outputs[finish.choice].finish = finish

    def finish(self, finish: Finish) -> Finish:
        """The finish with the prefill worker's cache hits, which decode cannot know."""
        return replace(finish, usage=replace(finish.usage, cached_prompt_tokens=self.cached_tokens))

    def record(self) -> HandoffRecord:
        last = self.trials[-1] if self.trials else None
        r = (last and last.report) or NO_REPORT
        decode_s = self.last_token_at - self.first_token_at
        received = self.request.received
        reported = [trial for trial in self.trials if trial.report is not None]
        ends = [output.finish for output in self.outputs if output.finish is not None]
        matches, rejections = (self.verdict.matches, self.verdict.rejections) if self.verdict else ((), ())
        return HandoffRecord(
            request_id=self.request.id,
            prefill_worker=last.pair.prefill.id if last else "",
            decode_worker=last.pair.decode.id if last else "",
            attempts=self.attempts,
            prompt_tokens=len(self.request.prompt_ids),
            computed_tokens=r.computed_tokens,
            sent_tokens=r.sent_tokens,
            bytes_sent=r.bytes_sent,
            frames_sent=r.frames_sent,
            queued_ms=r.queued_ms,
            prefill_ms=r.prefill_ms,
            transfer_ms=r.transfer_ms,
            first_token_ms=ms(received, self.first_token_at),
            decode_tokens_per_s=(self.output_tokens - 1) / decode_s if decode_s > 0 else 0.0,
            conversions=_converted(self.trials),
            notes=(*self.request.notes, *self.notes),
            output_tokens=self.output_tokens,
            outcome=self.outcome,
            intake_ms=ms(received, self.taken),
            admitted_ms=ms(received, self.admitted_at),
            push_ms=r.push_ms,
            decode_ms=ms(self.first_token_at, self.last_token_at),
            total_ms=ms(received, self.ended_at),
            candidates=tuple(
                group_pair(_ids(match.prefills), _ids(match.decodes), match.conversions)
                for match in matches[:_MAX_GROUPS]
            ),
            rejected=tuple(
                group_pair(rejection.prefill_ids, rejection.decode_ids, rejection.differences)
                for rejection in rejections[:_MAX_GROUPS]
            ),
            history=tuple(trial.record(received) for trial in self.trials[:_MAX_HISTORY]),
            choices=self.request.n,
            prefills=len(reported),
            transfers=sum(not trial.pair.here for trial in reported),
            shared_pages=sum(finish.shared_pages for finish in ends),
            copied_pages=sum(finish.copied_pages for finish in ends),
            trace_id=self.trace.trace_id,
        )

    def close(self) -> HandoffRecord:
        """One structured line per request, and its spans. Returns the record that they are made of."""
        record = self.record()
        if log.isEnabledFor(logging.INFO):
            log.info("request %s", Told({"label": self.request.label} | asdict(record)))
        self.trace.end(self)
        return record


def ways(pair: Pair) -> tuple[object, ...]:
    """In which arithmetic a pair works."""
    return computes_like(pair.prefill), computes_like(pair.decode)


def group_pair(
    prefill_ids: tuple[str, ...], decode_ids: tuple[str, ...], differences: tuple[FieldDifference, ...]
) -> GroupPair:
    return GroupPair(
        prefill_ids[:_IDS_OF_A_GROUP], decode_ids[:_IDS_OF_A_GROUP], len(prefill_ids), len(decode_ids), differences
    )


def _ids(members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(member.id for member in members)


def _converted(trials: list[Trial]) -> tuple[FieldDifference, ...]:
    """What was converted on the way to any of the tokens; the last attempt counts without any, too."""
    made = [trial for trial in trials if trial.output_tokens or trial is trials[-1]]
    return tuple(dict.fromkeys(difference for trial in made for difference in trial.pair.conversions))
