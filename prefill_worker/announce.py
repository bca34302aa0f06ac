"""When the sender hears of computed layers: often enough to hide the transfer, seldom enough not to slow the step down.

Each announcement wakes the event loop, which then competes with the engine's thread for the interpreter while the
layer after it is computed. So layers are announced in groups of about `GROUP_BYTES`, as the sender packs them, with
two exceptions: the first one, so that frames travel from the start, and the last two each on its own, so that after
the logits only one layer is left to send.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_transfer.codec import ITEM_BYTES
from cache_transfer.contract import WorkerContract
from prefill_worker.handoff import Job

GROUP_BYTES = 1 << 20


class Announcements:
    """Of one step; called in the engine's thread.

    Args:
        parts: for each prompt in the step its job and the token range [start, end) that the step computes.
    """

    def __init__(self, contract: WorkerContract, parts: Sequence[tuple[Job, int, int]]) -> None:
        tokens = sum(end - start for _, start, end in parts)
        item = ITEM_BYTES[contract.kv_dtype]
        self._bytes = [tokens * sum(p.heads * p.head_dim * item for p in planes) for planes in contract.planes]
        self._parts = parts
        self._first = 0  # layer that was not announced yet
        self._pending = 0  # bytes since then

    def __call__(self, layer: int) -> None:
        """K and V of `layer` are final for all parts. Layers come in order."""
        self._pending += self._bytes[layer]
        if layer and layer < len(self._bytes) - 2 and self._pending < GROUP_BYTES:
            return
        layers = range(self._first, layer + 1)
        self._first, self._pending = layer + 1, 0
        for job, start, end in self._parts:
            job.announce(layers, start, end)
