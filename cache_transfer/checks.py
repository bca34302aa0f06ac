"""What a receiver checks of the messages after the grant: a frame's header, the logits, the commit.

Payloads are verified by the writers, off the event loop.
"""

from __future__ import annotations

from cache_transfer import digests
from cache_transfer.codec import ITEM_BYTES, Coverage, decode_header
from cache_transfer.contract import WorkerContract
from cache_transfer.messages import MAX_PAYLOAD_BYTES, Commit, Frame, FrameHeader, Logits, SharedFrame
from cache_transfer.refusals import data_loss
from cache_transfer.shared import Shared
from cache_transfer.tickets import Claim
from pdserve.errors import Internal, InvalidRequest


def accept_frame(frame: Frame | SharedFrame, coverage: Coverage, secret: bytes, shared: Shared | None) -> FrameHeader:
    """The header of a frame that may come next; counts it as received.

    Args:
        shared: where the payload of a SharedFrame lies.

    One that makes no sense was damaged on its way, and may be sent again, unless its digest says
    that its sender meant it. All others are hashed by the writers.
    """
    if shared is not None and isinstance(frame, SharedFrame):
        shared.check(frame)
    try:
        header = decode_header(frame.header)
        coverage.accept(header, frame.size)
    except InvalidRequest as error:
        if frame.size > MAX_PAYLOAD_BYTES or digests.same(_digest(frame, secret, shared), frame.digest):
            raise
        raise data_loss(f"a frame did not verify; as it is, {error.message}", "FRAME_DIGEST", "frame") from None
    return header


def _digest(frame: Frame | SharedFrame, secret: bytes, shared: Shared | None) -> bytes:
    payload = payload_of(frame, shared, bytearray(frame.size if isinstance(frame, SharedFrame) else 0))
    return digests.frame_digest(secret, frame.header, payload)


def payload_of(frame: Frame | SharedFrame, shared: Shared | None, room: bytearray) -> memoryview:
    """The payload, in memory that the sender cannot change: the message, or `room` for a shared frame."""
    if isinstance(frame, Frame):
        return frame.payload
    if shared is None:
        raise Internal("a shared frame was accepted without shared memory")
    return shared.read(frame, memoryview(room))


def check_logits(message: Logits, claim: Claim, contract: WorkerContract) -> None:
    """Raises DataLoss (LOGITS_DIGEST), or InvalidRequest for scores that no sender of this contract could mean."""
    digest = digests.logits_digest(claim.secret, message.dtype, message.position, message.data)
    if not digests.same(digest, message.digest):
        raise data_loss("the logits did not verify", "LOGITS_DIGEST", "logits")
    dtype = "float64" if contract.activation_dtype == "float64" else "fp32"
    size = contract.vocab_size * ITEM_BYTES[dtype]
    if message.dtype != dtype:
        raise InvalidRequest(
            f"{message.dtype[:32]!r} is not {dtype}",
            reason="LOGITS_DTYPE",
            field="logits.dtype",
            remedy=f"send them as {dtype}",
        )
    if len(message.data) != size:
        raise InvalidRequest(
            f"{len(message.data)} bytes, not {size}",
            reason="LOGITS_SIZE",
            field="logits.data",
            remedy=f"send {contract.vocab_size} logits of {ITEM_BYTES[dtype]} bytes",
        )
    if message.position != claim.end - 1:
        raise InvalidRequest(
            f"taken at token {message.position}, the prompt's last is {claim.end - 1}",
            reason="LOGITS_POSITION",
            field="logits.position",
            remedy="send the logits of the prompt's last token",
        )


def check_commit(commit: Commit, claim: Claim, coverage: Coverage, manifest: digests.Manifest, logits: Logits) -> None:
    """Raises DataLoss (FRAMES_MISSING, MANIFEST) unless all came that was granted, and the commit says so."""
    if not coverage.complete:
        raise data_loss(f"the commit came before {coverage.missing()}", "FRAMES_MISSING", "commit")
    expected = (manifest.frames, manifest.payload_bytes, claim.start, claim.end)
    stated = (commit.frames, commit.payload_bytes, commit.start, commit.end)
    if stated != expected:
        raise data_loss(f"the manifest says {stated}, received were {expected}", "MANIFEST", "commit")
    if not digests.same(manifest.digest(logits.digest, claim.start, claim.end), commit.digest):
        raise data_loss("the manifest did not verify", "MANIFEST", "commit")
