"""How many tokens a worker can take."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.registry.records import PREFILL, WorkerRecord

_UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class Room:
    """The most tokens a worker, or a pair of them, can take."""

    prompt: int
    total: int  # prompt and output together

    def takes(self, prompt: int, total: int) -> bool:
        return prompt <= self.prompt and total <= self.total


def worker_room(record: WorkerRecord) -> Room:
    """What one worker's context and page pool allow. An unstated limit (0) does not bound.

    Decode caches all but the last token of an output; prefill only ever holds the prompt.
    """
    context = record.contract.context_limit or _UNLIMITED
    pool = record.load.pages_total * record.contract.page_size or _UNLIMITED
    if record.role == PREFILL:
        return Room(prompt=min(context - 1, pool), total=context)
    total = min(context, pool + 1)
    return Room(prompt=total - 1, total=total)
