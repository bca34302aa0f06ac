"""The opening of a push: how a sender makes it, and what its receiver compares before anything is granted."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_transfer import digests
from cache_transfer.contract import (
    LOSSY,
    HandoffIdentity,
    Ticket,
    WorkerContract,
    arithmetic,
    check_compatible,
    check_identity,
)
from cache_transfer.messages import INTEGRITY, PushOpening, SharedMemory
from pdserve.errors import DataLoss, FieldDifference, Incompatible, InvalidRequest

Numerics = tuple[tuple[str, str], ...]  # of contract.arithmetic


@dataclass(frozen=True)
class Due:
    """What the opening of a handoff must bear out, for every attempt but the secret."""

    identity: HandoffIdentity
    logits_only: bool
    announced: Numerics | None  # of the sender; None: any that are compatible
    secret: bytes = field(repr=False)


def make_opening(
    ticket: Ticket,
    identity: HandoffIdentity,
    contract: WorkerContract,
    *,
    logits_only: bool,
    shared: SharedMemory | None = None,
) -> PushOpening:
    """What a holder of the ticket sends first."""
    return PushOpening(
        handoff_id=ticket.handoff_id,
        attempt=ticket.attempt,
        incarnation=ticket.incarnation,
        proof=digests.proof(ticket.secret, identity),
        identity=identity,
        contract=contract,
        kv_dtype=contract.kv_dtype,
        logits_only=logits_only,
        shared=shared,
    )


def check_opening(opening: PushOpening, due: Due, contract: WorkerContract) -> tuple[FieldDifference, ...]:
    """Returns the differences that are converted. The order puts the most telling error first.

    Args:
        contract: the receiver's own.

    Raises:
        DataLoss: PROOF, the sender does not hold the secret or stated another identity.
        Incompatible: CONTRACT_MISMATCH, IDENTITY_MISMATCH, KV_DTYPE, with the differences.
        InvalidRequest: INTEGRITY, LOGITS_ONLY.
    """
    if not digests.same(digests.proof(due.secret, opening.identity), opening.proof):
        raise DataLoss(
            "the sender's proof does not match its ticket and identity",
            reason="PROOF",
            field="proof",
            remedy="prove the ticket's own secret over the identity that is sent",
            retryable=False,
        )
    if opening.integrity != INTEGRITY:
        raise InvalidRequest(
            f"{opening.integrity[:32]!r} is not known", reason="INTEGRITY", field="integrity", remedy=f"use {INTEGRITY}"
        )
    conversions = check_compatible(opening.contract, contract)
    _check_numerics(due.announced, opening.contract)
    check_identity(due.identity, opening.identity)
    if opening.kv_dtype != opening.contract.kv_dtype:
        difference = FieldDifference("KV_DTYPE", opening.kv_dtype[:32], opening.contract.kv_dtype)
        raise Incompatible(
            f"the frames' dtype is not the contract's: {difference}",
            reason="KV_DTYPE",
            field="kv_dtype",
            remedy="send frames of the dtype that the contract names",
            differences=(difference,),
        )
    if opening.logits_only != due.logits_only:
        raise InvalidRequest(
            f"the ticket is for {'logits only' if due.logits_only else 'a cache'}",
            reason="LOGITS_ONLY",
            field="logits_only",
            remedy="open the push as the ticket's request says",
        )
    return conversions


def _check_numerics(announced: Numerics | None, sender: WorkerContract) -> None:
    """The request was admitted, and its conversions reported, for a sender of these numerics."""
    if announced is None:
        return
    pairs = zip(arithmetic(sender), announced, strict=True)
    found = tuple(FieldDifference(code, got, was, LOSSY) for (code, got), (_, was) in pairs if got != was)
    if found:
        raise Incompatible(
            f"the sender is not the one that was announced: {found[0]}",
            field=found[0].code,
            remedy="name the sending worker's own contract in Decode/Generate",
            differences=found,
        )
