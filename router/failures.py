"""How a request can fail on its way, as errors, and which failures another pair of workers may mend."""

from __future__ import annotations

from pdserve.errors import DeadlineExceeded, Incompatible, Internal, PdserveError, Refused, Unavailable
from router.gate import Member
from router.request import Request
from router.wire import WORKER_LOST, DecodeEvent

FIRST_TOKEN_TIMEOUT = "FIRST_TOKEN_TIMEOUT"
INTER_TOKEN_TIMEOUT = "INTER_TOKEN_TIMEOUT"
TOKENS_MISMATCH = "TOKENS_MISMATCH"

# The worker does not answer, or answers without doing its work.
_SUSPICIOUS = (WORKER_LOST, FIRST_TOKEN_TIMEOUT, INTER_TOKEN_TIMEOUT)

# A worker's own time limit, state or contract (it may have changed since it was last heard of), which another
# worker need not share.
_MOVABLE = (DeadlineExceeded, Refused, Incompatible)


def movable(error: PdserveError) -> bool:
    """Another pair may do better."""
    return error.retryable or isinstance(error, _MOVABLE)


def suspicious(error: PdserveError) -> bool:
    """The worker at fault should get no work until it is heard of again."""
    return error.reason in _SUSPICIOUS


def for_client(error: PdserveError) -> PdserveError:
    """The last worker's error, when no pair is left. A refusal speaks of a ticket, which the client never had."""
    if not isinstance(error, Refused):
        return error
    return Unavailable(
        f"no attempt could answer this request; the last one ended with {error.reason}: {error.message}",
        reason="NO_ATTEMPT_LEFT",
        field="model",
        remedy="send the request again later",
        retry_after_ms=1000,
    )


def silent(member: Member, limit_s: float) -> Unavailable:
    """For the worker whose turn it was when the time for a first token was over."""
    return Unavailable(
        f"no token came within {limit_s:g} s; {member.record.role} worker {member.id} was at work",
        reason=FIRST_TOKEN_TIMEOUT,
        field="router.first_token_timeout_s",
        remedy="send the request again, or allow more time for long prompts and queues",
    )


def stopped(member: Member, limit_s: float) -> Unavailable:
    """For a decode worker that has given tokens and no longer does."""
    return Unavailable(
        f"decode worker {member.id} gave no token for {limit_s:g} s, and its engine stood still",
        reason=INTER_TOKEN_TIMEOUT,
        field="router.inter_token_timeout_s",
        remedy="send the request again, or allow more time for slow steps",
    )


def draining() -> Unavailable:
    """For a request that the end of this router overtakes."""
    return Unavailable(
        "this router is shutting down",
        reason="DRAINING",
        field="router",
        remedy="send the request again, to another router or once this one is back",
    )


def deadline_exceeded(request: Request, output_tokens: int) -> DeadlineExceeded:
    stage = f"after {output_tokens} tokens" if output_tokens else "before its first token"
    return DeadlineExceeded(
        f"the request was stopped {stage}, {request.deadline - request.received:g} s after it came",
        field="deadline",
        remedy="allow more time, or ask for fewer tokens",
    )


def mismatch(member: Member, problem: str) -> Internal:
    """For tokens that are not those which were due: they are never forwarded."""
    return Internal(f"decode worker {member.id} {problem}", reason=TOKENS_MISMATCH, field="tokens", retryable=True)


def unexpected(event: DecodeEvent, when: str) -> Internal:
    return Internal(f"a decode worker sent {type(event).__name__} {when}", reason="UNEXPECTED_EVENT", retryable=True)
