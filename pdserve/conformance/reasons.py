"""The stable reason codes of a Push stream: the status and retryability each one has.

docs/protocol.md prints this table, and a test compares the two and the code that raises them.
"""

from __future__ import annotations

import grpc

_S = grpc.StatusCode

# reason -> (status, whether another attempt may succeed)
PUSH_REASONS: dict[str, tuple[grpc.StatusCode, bool]] = {
    "MALFORMED_MESSAGE": (_S.INVALID_ARGUMENT, False),
    "MALFORMED_CONTRACT": (_S.INVALID_ARGUMENT, False),
    "MALFORMED_IDENTITY": (_S.INVALID_ARGUMENT, False),
    "MESSAGE_ORDER": (_S.INVALID_ARGUMENT, False),
    "INCARNATION": (_S.ABORTED, True),
    "ATTEMPT_STALE": (_S.ABORTED, True),
    "TICKET_USED": (_S.ABORTED, True),
    "TICKET_UNKNOWN": (_S.FAILED_PRECONDITION, False),
    "TICKET_EXPIRED": (_S.FAILED_PRECONDITION, False),
    "PROOF": (_S.DATA_LOSS, False),
    "INTEGRITY": (_S.INVALID_ARGUMENT, False),
    "CONTRACT_MISMATCH": (_S.FAILED_PRECONDITION, False),
    "IDENTITY_MISMATCH": (_S.FAILED_PRECONDITION, False),
    "KV_DTYPE": (_S.FAILED_PRECONDITION, False),
    "LOGITS_ONLY": (_S.INVALID_ARGUMENT, False),
    "FRAME_HEADER": (_S.INVALID_ARGUMENT, False),
    "FRAME_SEQUENCE": (_S.DATA_LOSS, True),
    "FRAME_PLANE": (_S.INVALID_ARGUMENT, False),
    "FRAME_DTYPE": (_S.INVALID_ARGUMENT, False),
    "FRAME_HEADS": (_S.INVALID_ARGUMENT, False),
    "FRAME_TOKENS": (_S.INVALID_ARGUMENT, False),
    "FRAME_SIZE": (_S.INVALID_ARGUMENT, False),
    "SHARED_RANGE": (_S.INVALID_ARGUMENT, False),
    "FRAME_OVERLAP": (_S.DATA_LOSS, True),
    "FRAME_GAP": (_S.DATA_LOSS, True),
    "FRAME_DIGEST": (_S.DATA_LOSS, True),
    "LOGITS_DTYPE": (_S.INVALID_ARGUMENT, False),
    "LOGITS_SIZE": (_S.INVALID_ARGUMENT, False),
    "LOGITS_DIGEST": (_S.DATA_LOSS, True),
    "LOGITS_POSITION": (_S.INVALID_ARGUMENT, False),
    "FRAMES_MISSING": (_S.DATA_LOSS, True),
    "MANIFEST": (_S.DATA_LOSS, True),
    "SENDER_GONE": (_S.CANCELLED, False),
    "DEADLINE_EXCEEDED": (_S.DEADLINE_EXCEEDED, False),
}
