"""Tickets and grants end on time, each on its own, and without traffic: on an injected clock of one second."""

from __future__ import annotations

import pytest

from cache_transfer.contract import Endpoint
from cache_transfer.opening import make_opening
from cache_transfer.tickets import TicketBook
from pdserve.errors import Refused
from tests.cache_transfer.support import INCARNATION, make_contract, make_identity
from tests.clock import Clock

CONTRACT = make_contract()
IDENTITY = make_identity(CONTRACT, 9)


def made() -> tuple[TicketBook, Clock]:
    clock = Clock()
    return TicketBook(INCARNATION, 1.0, (Endpoint("127.0.0.1:7"),), clock), clock


def test_a_ticket_of_one_second_is_expired_at_three() -> None:
    book, clock = made()
    ticket = book.issue("r", IDENTITY, 0, False)
    clock.now += 3.0
    with pytest.raises(Refused) as caught:
        book.claim(make_opening(ticket, IDENTITY, CONTRACT, logits_only=False), CONTRACT)
    assert (caught.value.reason, caught.value.field) == ("TICKET_EXPIRED", "ttl_ms")
    assert "expired" in str(caught.value)


def test_a_ticket_that_is_renewed_saves_no_other() -> None:
    """Of three of the same age one is reissued: it alone can be claimed later on."""
    book, clock = made()
    tickets = [book.issue(f"r{number}", IDENTITY, 0, False) for number in range(3)]
    clock.now += 0.9
    renewed = book.reissue(tickets[1].handoff_id)
    clock.now += 0.9
    for ticket in (tickets[0], tickets[2]):
        with pytest.raises(Refused, match="expired"):
            book.claim(make_opening(ticket, IDENTITY, CONTRACT, logits_only=False), CONTRACT)
    assert book.claim(make_opening(renewed, IDENTITY, CONTRACT, logits_only=False), CONTRACT).attempt == 2


def test_a_claim_does_not_renew_the_others_either() -> None:
    book, clock = made()
    first, second = (book.issue(name, IDENTITY, 0, False) for name in "ab")
    clock.now += 0.5
    claim = book.claim(make_opening(first, IDENTITY, CONTRACT, logits_only=False), CONTRACT)
    assert claim.expires_at == clock.now + 0.5
    clock.now += 0.5
    with pytest.raises(Refused, match="expired"):
        book.claim(make_opening(second, IDENTITY, CONTRACT, logits_only=False), CONTRACT)
