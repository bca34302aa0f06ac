"""Two books, compared: what the block manager has, and what live requests say they hold."""

from __future__ import annotations

import math

import pytest

from pdserve.engine.blocks import BlockManager
from pdserve.engine.prefix import Prefix
from pdserve.worker.accounts import LEASE, ORPHAN, PIN, REQUEST, TICKET, Holding, Stake, take_stock

NOW = 100.0


def books() -> BlockManager:
    """Eight pages: three of a, one of b's pin, one cached."""
    manager = BlockManager(8, 2)
    manager.allocate("a", 3)
    manager.allocate("b/pin", 1)
    manager.publish(Prefix(b"t", (1, 2), 2), manager.allocate("old", 1))
    manager.release("old")
    return manager


STAKES = (
    Stake("a", REQUEST, (0, 1, 2), NOW + 5),
    Stake("b", TICKET, (), NOW + 2),
    Stake("b/pin", PIN, (3,), NOW - 1),
)


def test_every_page_has_its_place_and_every_holding_its_deadline() -> None:
    accounts = take_stock(books(), STAKES, NOW)
    assert (accounts.pages_total, accounts.pages_held, accounts.pages_cached, accounts.pages_free) == (8, 4, 1, 3)
    assert accounts.holdings == (
        Holding("a", REQUEST, 3, 5.0), Holding("b", TICKET, 0, 2.0), Holding("b/pin", PIN, 1, 0.0)
    )  # fmt: skip
    assert accounts.fault == ""


@pytest.mark.parametrize(
    ("stakes", "fault"),
    [
        (STAKES[:2], "nobody alive answers for the 1 pages of b/pin"),
        ((), "nobody alive answers for the 3 pages of a"),
        ((*STAKES, Stake("c", LEASE, (), math.inf)), "c has no deadline"),
        ((*STAKES, Stake("c", LEASE, (), math.nan)), "c has no deadline"),
        ((*STAKES, STAKES[0]), "a is two owners"),
        ((*STAKES, Stake("c", LEASE, (7,), NOW)), "c says it holds pages [7], booked are []"),
        ((Stake("a", REQUEST, (0, 1), NOW), *STAKES[1:]), "a says it holds pages [0, 1], booked are [0, 1, 2]"),
    ],
)
def test_a_difference_between_the_books_is_named(stakes: tuple[Stake, ...], fault: str) -> None:
    assert fault in take_stock(books(), stakes, NOW).fault


def test_an_orphan_is_listed_as_one() -> None:
    accounts = take_stock(books(), STAKES[1:], NOW)
    assert Holding("a", ORPHAN, 3) in accounts.holdings
    assert sum(h.pages for h in accounts.holdings) == accounts.pages_held


def test_a_fault_of_the_page_books_comes_first() -> None:
    manager = books()
    manager._references[0] = 5
    assert "page 0: 5 references" in take_stock(manager, (), NOW).fault


class Miscounted(BlockManager):
    """One that reports a page too many where `check_integrity` does not look."""

    wrong = ""

    @property
    def held_count(self) -> int:
        return super().held_count + (self.wrong == "held")

    @property
    def free_count(self) -> int:
        return super().free_count + (self.wrong == "free")


@pytest.mark.parametrize(("wrong", "fault"), [("held", "pages held: 1,"), ("free", "not the sum")])
def test_the_counts_are_checked_too(wrong: str, fault: str) -> None:
    manager = Miscounted(4, 2)
    manager.wrong = wrong
    assert fault in take_stock(manager, (), NOW).fault
