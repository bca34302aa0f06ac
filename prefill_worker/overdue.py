"""Why a prompt is ended that took too long."""

from __future__ import annotations

from pdserve.errors import DeadlineExceeded
from prefill_worker.scheduler import Prompt, State


def overdue(prompt: Prompt) -> DeadlineExceeded:
    if prompt.state is State.QUEUED:
        return DeadlineExceeded(
            "the prompt waited too long for its turn",
            reason="QUEUE_TIMEOUT",
            remedy="send it to another prefill worker, or add one",
            retryable=True,
        )
    return DeadlineExceeded(
        "the handoff did not end within its lease, or its caller's deadline",
        reason="LEASE_ENDED",
        field="prefill.lease_s",
        remedy="check that the decode worker has free pages, or raise lease_s",
        retryable=True,
    )
