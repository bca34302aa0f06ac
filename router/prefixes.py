"""What the router remembers about which worker has seen which prompt prefix.

A guess, never a promise: workers evict as they like, so it only bends placement. A prefix
is known by a chain of block digests whose root is the cache identity (contract, adapter,
tenant), so equal ids under another model or tenant never meet.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict

from cache_transfer.encoding import encode

BLOCK_TOKENS = 32
_MAX_BLOCKS = 1024  # blocks of one prompt that are remembered: 32,768 tokens
_WORKERS_PER_BLOCK = 8


def chain(ids: tuple[int, ...], contract_digest: bytes, adapter: bytes | None, tenant: str) -> tuple[bytes, ...]:
    """One digest per whole block of the prompt; equal digests mean equal prefixes."""
    link = hashlib.sha256(encode(("prefix", contract_digest, adapter, tenant))).digest()
    links = []
    for block in range(min(len(ids) // BLOCK_TOKENS, _MAX_BLOCKS)):
        part = ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        link = hashlib.sha256(link + struct.pack(f"<{BLOCK_TOKENS}i", *part)).digest()
        links.append(link)
    return tuple(links)


class PrefixRecord:
    """Block digest -> the incarnations it was last sent to. Bounded; the oldest use goes first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._seen: OrderedDict[bytes, OrderedDict[bytes, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def record(self, links: tuple[bytes, ...], incarnation: bytes) -> None:
        """Notes that this worker now holds the prefix. Later blocks are forgotten before earlier ones."""
        for link in reversed(links):
            workers = self._seen.setdefault(link, OrderedDict())
            workers[incarnation] = None
            workers.move_to_end(incarnation)
            if len(workers) > _WORKERS_PER_BLOCK:
                workers.popitem(last=False)
            self._seen.move_to_end(link)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)

    def held_tokens(self, links: tuple[bytes, ...]) -> dict[bytes, int]:
        """Incarnation -> tokens of this prompt it probably holds; absent means none."""
        held: Counter[bytes] = Counter()
        for block, link in enumerate(links):
            if link not in self._seen:
                break
            for incarnation in self._seen[link]:
                if held[incarnation] == block * BLOCK_TOKENS:
                    held[incarnation] += BLOCK_TOKENS
        return {incarnation: tokens for incarnation, tokens in held.items() if tokens}
