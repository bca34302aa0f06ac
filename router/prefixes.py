"""What the router remembers about which worker has seen which prompt prefix.

A guess, never a promise: workers evict as they like, so it only bends placement. A prefix
is known by a chain of block digests whose root is the cache identity (contract, adapter,
tenant), so equal ids under another model or tenant never meet.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from cache_transfer.encoding import encode
from pdserve.registry.prefix_notes import KEY_BYTES, MAX_BLOCKS, Sent

BLOCK_TOKENS = 32
_WORKERS_PER_BLOCK = 8
_MAX_NEWS = 4096  # prompts not yet told to other routers


def chain(ids: tuple[int, ...], contract_digest: bytes, adapter: bytes | None, tenant: str) -> tuple[bytes, ...]:
    """One digest per whole block of the prompt; equal digests mean equal prefixes."""
    link = hashlib.sha256(encode(("prefix", contract_digest, adapter, tenant))).digest()
    links = []
    for block in range(min(len(ids) // BLOCK_TOKENS, MAX_BLOCKS)):
        part = ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        link = hashlib.sha256(link + struct.pack(f"<{BLOCK_TOKENS}i", *part)).digest()
        links.append(link)
    return tuple(links)


class PrefixRecord:
    """Block -> the incarnations it was last sent to. Bounded; the oldest use goes first.

    Blocks are known by the beginning of their digest: that two share it is out of reach of chance, and whoever
    wanted it would only bend placement.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._seen: OrderedDict[bytes, OrderedDict[bytes, None]] = OrderedDict()
        self._news: deque[Sent] | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def record(self, links: tuple[bytes, ...], *incarnations: bytes) -> None:
        """Notes that these workers now hold the prefix, for other routers, too."""
        sent = Sent(tuple(link[:KEY_BYTES] for link in links), tuple(dict.fromkeys(incarnations)))
        if sent.keys:
            self.learn(sent)
            if self._news is not None:
                self._news.append(sent)

    def learn(self, sent: Sent) -> None:
        """Later blocks are forgotten before earlier ones."""
        for key in reversed(sent.keys):
            workers = self._seen.setdefault(key, OrderedDict())
            for incarnation in sent.incarnations:
                workers[incarnation] = None
                workers.move_to_end(incarnation)
            while len(workers) > _WORKERS_PER_BLOCK:
                workers.popitem(last=False)
            self._seen.move_to_end(key)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)

    def share(self) -> None:
        """From now on there are `news`, which a router without others would only keep."""
        self._news = deque(maxlen=_MAX_NEWS)

    def news(self) -> Iterable[Sent]:
        """What was recorded here since the last call, oldest first; takes it. Of too much the oldest is gone."""
        while self._news:
            yield self._news.popleft()

    def held_tokens(self, links: tuple[bytes, ...]) -> dict[bytes, int]:
        """Incarnation -> tokens of this prompt it probably holds; absent means none."""
        held: Counter[bytes] = Counter()
        for block, link in enumerate(links):
            workers = self._seen.get(link[:KEY_BYTES])
            if workers is None:
                break
            for incarnation in workers:
                if held[incarnation] == block * BLOCK_TOKENS:
                    held[incarnation] += BLOCK_TOKENS
        return {incarnation: tokens for incarnation, tokens in held.items() if tokens}
