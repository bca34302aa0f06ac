"""What a receiver checks of the messages after the grant: a frame's header, the logits, the commit.

Payloads are verified by the writers, off the event loop.
"""

from __future__ import annotations

from cache_transfer import digests
from cache_transfer.codec import ITEM_BYTES, Coverage, decode_header
from cache_transfer.contract import WorkerContract
from cache_transfer.messages import Commit, Frame, FrameHeader, Logits
from cache_transfer.refusals import data_loss
from cache_transfer.tickets import Claim
from pdserve.errors import InvalidRequest


def accept_frame(frame: Frame, coverage: Coverage, secret: bytes) -> FrameHeader:
    """The header of a frame that may come next; counts it as received.

    One that makes no sense was damaged on its way, and may be sent again, unless its digest says
    that its sender meant it. All others are hashed by the writers.
    """
    try:
        header = decode_header(frame.header)
        coverage.accept(header, len(frame.payload))
    except InvalidRequest as error:
        if digests.same(digests.frame_digest(secret, frame.header, frame.payload), frame.digest):
            raise
        raise data_loss(f"a frame did not verify; as it is, {error.message}", "FRAME_DIGEST", "frame") from None
    return header


def check_logits(message: Logits, claim: Claim, contract: WorkerContract) -> None:
    """Raises DataLoss (LOGITS_DIGEST), or InvalidRequest for scores that no sender of this contract could mean."""
    digest = digests.logits_digest(claim.secret, message.dtype, message.position, message.data)
    if not digests.same(digest, message.digest):
        raise data_loss("the logits did not verify", "LOGITS_DIGEST", "logits")
    dtype = "float64" if contract.activation_dtype == "float64" else "fp32"
    size = contract.vocab_size * ITEM_BYTES[dtype]
    if message.dtype != dtype:
        raise InvalidRequest(f"{message.dtype[:32]!r} is not {dtype}", reason="LOGITS_DTYPE", field="logits.dtype")
    if len(message.data) != size:
        raise InvalidRequest(f"{len(message.data)} bytes, not {size}", reason="LOGITS_SIZE", field="logits.data")
    if message.position != claim.end - 1:
        raise InvalidRequest(
            f"taken at token {message.position}, the prompt's last is {claim.end - 1}",
            reason="LOGITS_POSITION",
            field="logits.position",
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
