"""The spans of one request at its router, made of what its account measures anyway.

    chat MODEL                       received .. end; below the caller's own span, if it names one
      placement                      the pair is chosen
      attempt                        begun .. the next one, or the end; the parent of what the workers do
      placement, attempt, ...        after a failure, or for another prefill worker of the same decode stream

Names of attributes are OpenTelemetry's for generative AI where it has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.telemetry.context import current, update
from pdserve.telemetry.traces import CLIENT, SERVER, Attributes, Span, Traces, is_failure
from router.request import Ask, ChatPrompt, Request
from router.trial import Trial, ms

if TYPE_CHECKING:
    from router.record import Account

CHAT, COMPLETION = "chat", "text_completion"


def operation(ask: Ask) -> str:
    return CHAT if isinstance(ask.prompt, ChatPrompt) else COMPLETION


class RequestTrace:
    """Mutable; lives as long as the request's task, whose scope it keeps."""

    def __init__(self, traces: Traces, request: Request) -> None:
        self._traces = traces
        name = f"{request.operation} {request.served}"
        self._root = traces.start(
            name, current().trace, _asked(request) if traces.on else None, kind=SERVER, at=request.received
        )
        self._attempt: tuple[Trial, Span] | None = None
        self._free_at = request.received  # since when a pair is looked for
        update(request_id=request.id, trace=self._root.context)

    @property
    def trace_id(self) -> str:
        return "" if self._root.context is None else self._root.context.trace_id

    def attempt(self, number: int, trial: Trial) -> None:
        """A pair was chosen: the attempt before it is over."""
        if not self._traces.on:
            update(attempt=number, handoff_id="")
            return
        self._end_attempt(trial.begun)
        self._traces.record("placement", self._root.context, self._free_at, trial.begun, _placed(trial))
        span = self._traces.start("attempt", self._root.context, _begun(number, trial), kind=CLIENT, at=trial.begun)
        self._attempt = trial, span
        update(attempt=number, handoff_id="", trace=span.context)

    def admitted(self, handoff_id: bytes) -> None:
        """The decode worker expects this handoff; empty: it computes the prompt itself."""
        update(handoff_id=handoff_id.hex())
        if self._attempt is not None:
            self._attempt[1].set({"pdserve.handoff_id": handoff_id.hex()})

    def failed(self) -> None:
        """The attempt has come to nothing, and another pair is looked for."""
        self._free_at = self._attempt[0].ended_at if self._attempt is not None else self._free_at

    def end(self, account: Account) -> None:
        if not self._traces.on:
            return
        self._end_attempt(account.ended_at)
        self._root.set(_answered(account))
        if is_failure(account.outcome):
            self._root.fail(account.outcome, account.error)
        self._root.end(account.ended_at)

    def _end_attempt(self, at: float) -> None:
        if self._attempt is None:
            return
        trial, span = self._attempt
        self._attempt = None
        span.set(
            {
                "pdserve.outcome": trial.outcome,
                "pdserve.failed_worker": trial.failed_worker,
                "pdserve.output_tokens": trial.output_tokens,
                "pdserve.first_token_ms": ms(trial.begun, trial.first_token_at),
            }
        )
        if trial.outcome and is_failure(trial.outcome):
            span.fail(trial.outcome, trial.error)
        span.end(trial.ended_at or at)


def _asked(request: Request) -> Attributes:
    sampling = request.sampling
    return {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": request.served,
        "gen_ai.response.model": request.served,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "pdserve.request_id": request.id,
        "pdserve.label": request.label,
        "pdserve.tenant": request.tenant,
    }


def _answered(account: Account) -> Attributes:
    return {
        "gen_ai.response.id": account.request.id,
        "gen_ai.response.finish_reasons": tuple(o.finish.reason for o in account.outputs if o.finish) or None,
        "gen_ai.response.time_to_first_chunk": ms(account.request.received, account.first_token_at) / 1000,
        "gen_ai.usage.output_tokens": account.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": account.cached_tokens,
        "pdserve.attempts": account.attempts,
        "pdserve.outcome": account.outcome,
    }


def _placed(trial: Trial) -> Attributes:
    choice = trial.pair.choice
    return {
        "pdserve.placement": trial.pair.placement,
        "pdserve.placement.reason": choice.reason,
        "pdserve.placement.prefill_candidates": choice.prefill_candidates,
        "pdserve.placement.decode_candidates": choice.decode_candidates,
        "pdserve.placement.predicted_handoff_ms": 1000 * choice.handoff_s,
        "pdserve.placement.predicted_decode_ms": 1000 * choice.here_s,
        "pdserve.placement.predicted_split_ms": 1000 * choice.split_s,
    }


def _begun(number: int, trial: Trial) -> Attributes:
    return {
        "pdserve.attempt": number,
        "pdserve.prefill_worker": "" if trial.pair.here else trial.pair.prefill.id,
        "pdserve.decode_worker": trial.pair.decode.id,
        "pdserve.first_index": trial.first_index,
    }
