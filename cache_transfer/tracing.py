"""The spans of one handoff at its receiver.

receive              claimed .. acknowledged or aborted, waiting for pages included; below the sender's `transfer`
  verify             commit read .. every byte found right
"""

from __future__ import annotations

import time

from cache_transfer.intake import AnyIntake
from cache_transfer.tickets import Claim
from pdserve.errors import PdserveError
from pdserve.telemetry.context import current, update
from pdserve.telemetry.traces import SERVER, Attributes, Traces


class Receipt:
    """Mutable. Made in the call that brings the handoff, whose scope it completes."""

    def __init__(self, traces: Traces, claim: Claim) -> None:
        self._traces = traces
        handoff_id = claim.handoff_id.hex()
        told: Attributes = {
            "pdserve.handoff_id": handoff_id,
            "pdserve.attempt": claim.attempt,
            "pdserve.request_id": current().request_id,
        }
        self._span = traces.start("receive", current().trace, told, kind=SERVER)
        self._granted_at = self._committed_at = 0.0
        self._begun = time.monotonic()
        update(handoff_id=handoff_id, attempt=claim.attempt, trace=self._span.context)

    def granted(self) -> None:
        self._granted_at = time.monotonic()

    def committed(self) -> None:
        """The sender's last message is here."""
        self._committed_at = time.monotonic()

    def end(self, intake: AnyIntake | None, error: PdserveError | None) -> None:
        now = time.monotonic()
        self._traces.record("verify", self._span.context, self._committed_at, now, error=error)
        if intake is not None:
            self._span.set({"pdserve.bytes": intake.manifest.payload_bytes, "pdserve.frames": intake.manifest.frames})
        if self._granted_at:
            self._span.set({"pdserve.grant_ms": 1000 * (self._granted_at - self._begun)})
        if error is not None:
            self._span.fail(error.reason, error)
        self._span.end(now)
