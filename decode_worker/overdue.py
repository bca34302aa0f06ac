"""Why the reaper ends a sequence, in words."""

from __future__ import annotations

from decode_worker.sequence import Sequence, State
from pdserve.errors import DeadlineExceeded


def expired(sequence: Sequence, now: float) -> DeadlineExceeded:
    """For the limit that is over at `now`, in monotonic seconds."""
    if now >= sequence.ends_at:
        return DeadlineExceeded(
            "the request did not end by its caller's deadline, or the worker's own",
            reason="GENERATE_TIMEOUT",
            field="deadline",
            remedy="allow more time, ask for fewer tokens, or raise generate_s",
        )
    if sequence.state is not State.WAITING:
        return DeadlineExceeded(
            "the cache did not arrive in time",
            reason="RECEIVE_TIMEOUT",
            field="decode.receive_s",
            remedy="send it to another pair of workers, or raise the limit",
            retryable=True,
        )
    cause = f"; the last attempt failed: {sequence.attempt_error}" if sequence.attempt_error else ""
    return DeadlineExceeded(
        f"no cache came before the ticket expired{cause}",
        reason="TICKET_EXPIRED",
        field="decode.ticket_ttl_s",
        remedy="send it to another pair of workers",
        retryable=True,
    )


def unread(sequence: Sequence, limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the reader left {sequence.stream.unread} tokens unread for {limit_s:g} s",
        reason="SLOW_READER",
        field="decode.reader_s",
        remedy="read the stream faster",
    )
