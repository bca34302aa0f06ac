"""Two engines of one process with a handoff between them: real pages on both sides, one receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cache_transfer.contract import Endpoint, HandoffIdentity, prompt_digest
from cache_transfer.memory import MemoryTransport
from cache_transfer.pages import PageSink
from cache_transfer.receiver import ReceivedLogits, Receiver, ReceiveReport, ReceiverSettings
from cache_transfer.sender import HandoffSender, SendReport
from cache_transfer.tickets import Claim, TicketBook
from pdserve.engine.engine import Engine
from pdserve.engine.handover import SequenceSink, SequenceSource
from pdserve.engine.plan import Chunk
from pdserve.errors import PdserveError
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import INCARNATION
from tests.engine.tiny import run

Pages = tuple[int, ...]


@dataclass
class Taken:
    """What decode's side was told of a handoff."""

    logits: ReceivedLogits | None = None
    error: PdserveError | None = None


class EngineHost:
    """Grants fixed pages of an engine's cache to every handoff."""

    def __init__(self, engine: Engine, pages: Pages) -> None:
        self._engine, self._pages = engine, pages
        self.taken = Taken()

    async def grant(self, claim: Claim) -> PageSink:
        return SequenceSink(self._engine.cache, self._pages, claim.start, claim.end, claim.kv_dtype)

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        self.taken.logits = logits

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        self.taken.error = error


def prefill(engine: Engine, ids: Sequence[int], pages: Pages, chunk: int = 10**9) -> Tensor:
    """The prompt's raw logits [V]; its cache is in `pages` afterwards."""
    logits = None
    for start in range(0, len(ids), chunk):
        logits = run(engine, Chunk("r", tuple(ids[start : start + chunk]), start, pages)).logits.get("r")
    assert logits is not None
    return logits[-1].clone()


async def hand_over(
    source: Engine,
    source_pages: Pages,
    target: Engine,
    target_pages: Pages,
    ids: Sequence[int],
    logits: Tensor,
    *,
    frame_bytes: int = 1 << 20,
    start: int = 0,
    end: int | None = None,
) -> tuple[SendReport, Taken]:
    """Through sender, receiver and the memory transport. `end`: how many tokens the sender announces."""
    host = EngineHost(target, target_pages)
    book = TicketBook(INCARNATION, WAIT_S, (Endpoint("127.0.0.1:1"),))
    receiver = Receiver(book, target.contract(), host, ReceiverSettings(max_payload_bytes=frame_bytes))
    identity = HandoffIdentity(target.contract().digest(), None, "t", prompt_digest(tuple(ids)), start, len(ids))
    ticket = book.issue("r", identity, start, False)
    sender = HandoffSender(
        MemoryTransport(receiver),
        ticket,
        identity,
        source.contract(),
        SequenceSource(source.cache, source_pages, 0, len(ids)),
        logits_only=False,
        deadline_s=WAIT_S,
    )
    for layer in range(source.spec.layers):
        sender.computed(layer, (0, len(ids) if end is None else end))
    dtype = "float64" if logits.element_size() == 8 else "fp32"
    sender.logits(dtype, logits.numpy().tobytes(), len(ids) - 1)
    try:
        async with asyncio.timeout(WAIT_S):
            report = await sender.run()
    finally:
        receiver.close()
    return report, host.taken
