"""Errors by which a receiver ends a stream: what was wrong with it, and what its sender can do."""

from __future__ import annotations

from cache_transfer.messages import Request
from pdserve.errors import Cancelled, DataLoss, Fenced, InvalidRequest, PdserveError


def data_loss(problem: str, reason: str, field: str) -> DataLoss:
    """A byte or a frame is not what the sender meant, or is missing."""
    return DataLoss(problem, reason=reason, field=field, remedy="send the cache again with a new ticket")


def stale(problem: str) -> Fenced:
    """A newer attempt has the ticket, or the handoff is over."""
    return Fenced(problem, reason="ATTEMPT_STALE", field="attempt", remedy="leave the cache to the newer attempt")


def out_of_order(message: Request | None, expected: str) -> PdserveError:
    if message is None:  # gRPC ends the messages of a cancelled call, too
        return sender_gone()
    return InvalidRequest(
        f"{type(message).__name__} came where {expected} was due",
        reason="MESSAGE_ORDER",
        field="request",
        remedy="send open, and after the grant frames, logits, commit",
    )


def sender_gone() -> Cancelled:
    return Cancelled(
        "the sender went away before its commit",
        reason="SENDER_GONE",
        field="push",
        remedy="see the prefill worker's log; the handoff may be tried again with a new ticket",
    )
