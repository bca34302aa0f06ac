"""Where every page of a worker is, and who answers for it.

Two books are compared: the block manager's (owner -> pages) and what the requests that are alive
say they hold. A difference between them is a leak or a theft, whatever else looks right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pdserve.errors import Internal
from pdserve.worker.parts import Books

REQUEST = "request"  # computes
PREEMPTED = "preempted"  # will compute again: no page
TICKET = "ticket"  # may be used to hand over a cache: no page yet, or none at all (logits only)
GRANT = "grant"  # a cache is on its way into the pages
PIN = "pin"  # a prefix that was here before
LEASE = "lease"  # of prefill
ORPHAN = "orphan"  # nobody answers for it: a fault


@dataclass(frozen=True)
class Stake:
    """What a live request says about itself. `owner` is its name in the block manager."""

    owner: str
    kind: str
    pages: tuple[int, ...]
    deadline: float  # monotonic seconds: when the reaper takes it


@dataclass(frozen=True)
class Holding:
    """Pages that one owner holds, and until when."""

    owner: str  # request or handoff id
    kind: str  # one of the above
    pages: int
    deadline_left_s: float = -1.0  # negative: no deadline


@dataclass(frozen=True)
class Accounts:
    """Where every page of the pool is. `fault` says which statement does not hold; empty: all do."""

    pages_total: int
    pages_free: int
    pages_held: int
    pages_cached: int
    holdings: tuple[Holding, ...] = ()
    fault: str = ""
    preemptions: int = 0  # since the start
    recomputed_tokens: int = 0  # since the start
    handoffs: int = 0  # caches that arrived whole; this and what follows: since the start, at decode workers
    forks: int = 0  # outputs that began on the cache of a prompt they share
    shared_pages: int = 0  # these, counted for each
    copied_pages: int = 0  # of these, copied because one of several was to write there


def take_stock(books: Books, stakes: Iterable[Stake], now: float) -> Accounts:
    """Lists every holding, and checks that both books agree. Reads only.

    Args:
        now: monotonic seconds.
    """
    stakes, booked = tuple(stakes), books.holdings()
    orphans = [owner for owner in booked if owner not in {stake.owner for stake in stakes}]
    holdings = [
        Holding(s.owner, s.kind, len(s.pages), max(0.0, s.deadline - now) if math.isfinite(s.deadline) else -1.0)
        for s in stakes
    ]
    holdings += [Holding(owner, ORPHAN, len(booked[owner])) for owner in orphans]
    accounts = Accounts(
        pages_total=books.pages,
        pages_free=books.free_count,
        pages_held=books.held_count,
        pages_cached=books.cached_count,
        holdings=tuple(holdings),
    )
    try:
        books.check_integrity()
        _check_stakes(stakes, booked)
        _check_counts(accounts, booked)
    except Internal as fault:
        return replace(accounts, fault=str(fault))
    return accounts


def _check_stakes(stakes: tuple[Stake, ...], booked: Mapping[str, tuple[int, ...]]) -> None:
    """Everything booked has one live owner, who knows of it, and a deadline."""
    said: dict[str, Stake] = {}
    for stake in stakes:
        if stake.owner in said:
            raise _broken(f"{stake.owner} is two owners")
        if not math.isfinite(stake.deadline):
            raise _broken(f"{stake.owner} has no deadline")
        said[stake.owner] = stake
        pages = booked.get(stake.owner, ())
        if set(stake.pages) != set(pages):
            raise _broken(f"{stake.owner} says it holds pages {sorted(stake.pages)}, booked are {sorted(pages)}")
    for owner, pages in booked.items():
        if owner not in said:
            raise _broken(f"nobody alive answers for the {len(pages)} pages of {owner}")


def _check_counts(accounts: Accounts, booked: Mapping[str, tuple[int, ...]]) -> None:
    """Every page is counted once: held by somebody, kept for reuse, or free."""
    held = len({page for pages in booked.values() for page in pages})
    if held != accounts.pages_held:
        raise _broken(f"pages held: {accounts.pages_held}, in the holdings: {held}")
    if accounts.pages_free + accounts.pages_cached + held != accounts.pages_total:
        raise _broken(f"{accounts.pages_total} pages are not the sum of free, cached and held ones")


def _broken(otherwise: str) -> Internal:
    return Internal(otherwise, reason="ACCOUNTS", field="holdings")
