"""One prompt on its way to decode: the sender that streams it, and what its caller will be told.

While a prompt is computed the engine's thread announces each layer of each chunk; the
sender reads the announced ranges from the prompt's own pages and puts them on the wire. So
the pages must stay until the sender has ended, and are never copied as a whole.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cache_transfer.sender import HandoffSender, SendReport
from cache_transfer.transport import Transport
from pdserve.errors import DeadlineExceeded, Incompatible, Internal, InvalidRequest, PdserveError, Refused
from prefill_worker.admission import PrefillRequest
from prefill_worker.scheduler import Prompt, State
from prefill_worker.tracing import PromptTrace

_LITTLE_ENDIAN = {"fp32": "<f4", "float64": "<f8"}


@dataclass(frozen=True)
class PrefillResult:
    """What one prompt took. Times in milliseconds, sizes in bytes."""

    computed_tokens: int
    cached_tokens: int
    sent_tokens: int
    bytes_sent: int  # payload of frames and logits
    frames_sent: int
    queued_ms: float
    prefill_ms: float  # first chunk started .. logits ready
    transfer_ms: float  # logits ready .. acknowledged
    push_ms: float  # granted .. acknowledged
    chunks: int


@dataclass(eq=False)
class Job:
    """A request, its prompt and its sender. Owned by the event loop, except where noted."""

    request: PrefillRequest
    prompt: Prompt
    address: str  # of the decode worker's Transfer service
    transport: Transport  # to it
    result: asyncio.Future[PrefillResult]
    received: float  # monotonic seconds, as all times here
    trace: PromptTrace
    admitted: float = 0.0
    computing: float = 0.0  # first chunk started
    computed: float = 0.0  # logits ready
    logits_bytes: int = 0
    sender: HandoffSender | None = None  # from the moment the prompt leaves the queue
    ending: tuple[State, PdserveError] | None = None  # why it was told to end early
    still: asyncio.Event = field(default_factory=asyncio.Event)  # no step writes its pages

    def __post_init__(self) -> None:
        self.still.set()

    def announce(self, layers: Iterable[int], start: int, end: int) -> None:
        """Tells the sender that tokens [start, end) of these layers are final. Any thread.

        The sender skips what decode holds already, and everything when only logits travel.
        """
        if self.sender is not None:
            for layer in layers:
                self.sender.computed(layer, (start, end))

    def commit(self, scores: Tensor) -> None:
        """The prompt is computed: hands its first-step logits [1, vocab_size] to the sender.

        Raises Internal (LOGITS_NOT_FINITE): scores that no sampler may see.
        """
        best = float(scores.max())
        if not math.isfinite(best):  # the maximum is NaN as soon as one score is
            raise Internal(
                f"the model's best logit is {best}",
                reason="LOGITS_NOT_FINITE",
                remedy="check the checkpoint and its dtype",
            )
        dtype = "float64" if scores.dtype == torch.float64 else "fp32"
        data = scores[-1].cpu().numpy().astype(_LITTLE_ENDIAN[dtype], copy=False).tobytes()
        self.computed, self.logits_bytes = time.monotonic(), len(data)
        if self.sender is not None:
            self.sender.logits(dtype, data, len(self.prompt.ids) - 1)

    def settle(self, error: PdserveError | None, report: SendReport | None) -> None:
        """Answers the caller with the report's figures, or with the error."""
        if self.result.done():
            return
        if report is None:
            self.result.set_exception(error or Internal("the handoff ended without a report", reason="HANDOFF"))
            # A caller that has gone reads it no more, and the worker has logged it.
            self.result.exception()
            return
        self.result.set_result(
            PrefillResult(
                computed_tokens=len(self.prompt.ids) - self.prompt.cached,
                cached_tokens=self.prompt.cached,
                sent_tokens=report.sent_tokens,
                bytes_sent=report.payload_bytes + self.logits_bytes,
                frames_sent=report.frames,
                queued_ms=1000 * (self.admitted - self.received),
                prefill_ms=1000 * (self.computed - self.computing),
                transfer_ms=1000 * (report.ack_at - self.computed),
                push_ms=1000 * (report.ack_at - report.granted_at),
                chunks=self.prompt.chunks,
            )
        )


def exit_state(error: PdserveError) -> State:
    """In which state a handoff ends that raised `error` by itself."""
    if isinstance(error, (Refused, Incompatible, InvalidRequest)):
        return State.REFUSED
    return State.EXPIRED if isinstance(error, DeadlineExceeded) else State.FAILED
