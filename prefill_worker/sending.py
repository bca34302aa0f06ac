"""How fast caches leave this worker, from what its senders measured."""

from __future__ import annotations

from dataclasses import dataclass

from cache_transfer.sender import SendReport

_KEEP = 0.9  # of what earlier handoffs said, with each new one


@dataclass
class SendRate:
    """Payload over the time that packing and sending it took, beside everything else that the worker did then."""

    _bytes: float = 0.0
    _seconds: float = 0.0

    def observe(self, report: SendReport) -> None:
        """A handoff that was acknowledged. One without a cache says nothing."""
        if report.payload_bytes and report.sending_s > 0:
            self._bytes = _KEEP * self._bytes + report.payload_bytes
            self._seconds = _KEEP * self._seconds + report.sending_s

    @property
    def bytes_per_s(self) -> float:
        """0 while nothing was sent."""
        return self._bytes / self._seconds if self._seconds else 0.0
