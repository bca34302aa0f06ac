"""Errors by which a receiver ends a stream, and what its sender makes of them."""

from __future__ import annotations

from cache_transfer.messages import Request, Response
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


def honest(error: PdserveError) -> PdserveError:
    """What a receiver's refusal means for a sender that follows the protocol.

    Where it read nonsense, or a proof that does not fit, bytes have changed on the way: no fault of
    whoever asked for the handoff, and another attempt may bring them whole.
    """
    if not isinstance(error, InvalidRequest) and error.reason != "PROOF":
        return error
    return DataLoss(
        f"the receiver did not get what was sent: {error.message}",
        reason=error.reason,
        field=error.field,
        remedy="send the cache again with a new ticket",
    )


def unexpected(message: Response | None, expected: str) -> DataLoss:
    return DataLoss(
        f"the receiver answered {message}, expected was {expected}",
        reason="UNEXPECTED_ANSWER",
        remedy="send the cache again; if it stays so, see whether both ends are of one version",
    )
