"""A sequence as the prefix index knows it: a chain of digests over identity and token ids, one per full page."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cache_transfer.encoding import sha256


@dataclass(frozen=True, slots=True)
class Link:
    """One full page of a sequence: what it holds, and under which digest it is looked for."""

    key: bytes  # chain digest
    parent: bytes  # the key before it; for the first page the digest of the identity
    identity: bytes
    content: bytes  # its token ids as int32


class Prefix:
    """The pages of one sequence as the index knows them. Each is hashed once, when it is first asked for.

    Args:
        identity: what must be equal besides the ids (contract, adapter, tenant).
        ids: tokens from the first on, of at most 31 bits; more may follow with `extend`.
    """

    def __init__(self, identity: bytes, ids: Iterable[int], page_size: int) -> None:
        self._identity = identity
        self._ids = array("i", ids)
        self._page_size = page_size
        self._links: list[Link] = []

    def __len__(self) -> int:
        """Tokens, those of a last page that is not full included."""
        return len(self._ids)

    def extend(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)

    def copy(self) -> Prefix:
        """One that goes on by itself; what was hashed stays hashed."""
        twin = Prefix(self._identity, self._ids, self._page_size)
        twin._links = self._links.copy()
        return twin

    def links(self, limit: int) -> Iterator[Link]:
        """The full pages, at most `limit` of them."""
        size = self._page_size
        for index in range(min(limit, len(self._ids) // size)):
            if index == len(self._links):
                parent = self._links[-1].key if index else _root(self._identity)
                content = self._ids[index * size : (index + 1) * size].tobytes()
                self._links.append(Link(_chain(parent, content), parent, self._identity, content))
            yield self._links[index]


def _root(identity: bytes) -> bytes:
    return sha256("prefix-root", identity)


def _chain(parent: bytes, content: bytes) -> bytes:
    """Both have a fixed length within one manager, so they need no tags between them."""
    return hashlib.sha256(parent + content).digest()


def same(found: Link, wanted: Link) -> bool:
    """What a digest found is what was looked for: the comparison after the hit (contract A9)."""
    return found is wanted or (
        found.parent == wanted.parent and found.identity == wanted.identity and found.content == wanted.content
    )


def key_of(link: Link) -> bytes:
    """The digest that its content should have."""
    return _chain(link.parent, link.content)


def root_of(identity: bytes) -> bytes:
    """The parent of first pages."""
    return _root(identity)
