"""Tickets: single use, strictly increasing attempts, expiry on the injected clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_transfer.contract import Endpoint, Ticket
from cache_transfer.opening import make_opening
from cache_transfer.tickets import Claim, TicketBook
from pdserve.errors import DataLoss, Fenced, Internal, PdserveError, Refused
from tests.cache_transfer.support import INCARNATION, make_contract, make_identity
from tests.clock import Clock

CONTRACT = make_contract()
IDENTITY = make_identity(CONTRACT, 9, start=4)


def make_book() -> tuple[TicketBook, Clock]:
    clock = Clock()
    return TicketBook(INCARNATION, 30.0, (Endpoint("127.0.0.1:7"),), clock), clock


def claim(book: TicketBook, ticket: Ticket) -> Claim:
    return book.claim(make_opening(ticket, IDENTITY, CONTRACT, logits_only=False), CONTRACT)


def reason_of(book: TicketBook, ticket: Ticket) -> tuple[type[PdserveError], str]:
    with pytest.raises(PdserveError) as caught:
        claim(book, ticket)
    assert caught.value.field and caught.value.remedy
    return type(caught.value), caught.value.reason


def test_a_ticket_says_what_is_expected() -> None:
    book, clock = make_book()
    ticket = book.issue("r", IDENTITY, 4, False)
    assert (ticket.attempt, ticket.incarnation, ticket.held_tokens, ticket.ttl_ms) == (1, INCARNATION, 4, 30_000)
    assert (len(ticket.handoff_id), len(ticket.secret)) == (16, 32)
    assert ticket.endpoints == (Endpoint("127.0.0.1:7"),)
    found = claim(book, ticket)
    assert (found.request_id, found.handoff_id, found.attempt) == ("r", ticket.handoff_id, 1)
    assert (found.start, found.end, found.expires_at) == (4, 9, clock.now + 30.0)


def test_secrets_are_never_shown_and_never_repeat() -> None:
    book, _ = make_book()
    tickets = [book.issue("r", IDENTITY, 4, False) for _ in range(3)]
    tickets += [book.reissue(tickets[0].handoff_id)]
    assert len({t.secret for t in tickets}) == 4
    assert len({t.handoff_id for t in tickets}) == 3
    found = claim(book, tickets[-1])
    for text in (repr(tickets[-1]), repr(found)):
        assert repr(found.secret) not in text
        assert "secret" not in text


def test_a_ticket_is_spent_once() -> None:
    book, _ = make_book()
    ticket = book.issue("r", IDENTITY, 4, False)
    claim(book, ticket)
    assert reason_of(book, ticket) == (Fenced, "TICKET_USED")


def test_a_refused_claim_spends_nothing() -> None:
    book, _ = make_book()
    ticket = book.issue("r", IDENTITY, 4, False)
    assert reason_of(book, replace(ticket, secret=b"x" * 32)) == (DataLoss, "PROOF")
    assert reason_of(book, replace(ticket, attempt=2)) == (Refused, "TICKET_UNKNOWN")
    assert reason_of(book, replace(ticket, incarnation=b"j" * 16)) == (Fenced, "INCARNATION")
    claim(book, ticket)


def test_reissue_revokes_in_one_step() -> None:
    book, _ = make_book()
    first = book.issue("r", IDENTITY, 4, False)
    claim(book, first)
    assert book.is_current(first.handoff_id, 1)
    second = book.reissue(first.handoff_id)
    assert (second.handoff_id, second.attempt) == (first.handoff_id, 2)
    assert not book.is_current(first.handoff_id, 1)
    assert book.is_current(first.handoff_id, 2)
    assert reason_of(book, first) == (Fenced, "ATTEMPT_STALE")
    assert reason_of(book, replace(second, secret=first.secret)) == (DataLoss, "PROOF")
    assert claim(book, second).attempt == 2


def test_expiry_follows_the_clock() -> None:
    book, clock = make_book()
    ticket = book.issue("r", IDENTITY, 4, False)
    clock.now += 30.0
    assert reason_of(book, ticket) == (Refused, "TICKET_EXPIRED")
    renewed = book.reissue(ticket.handoff_id)
    clock.now += 29.999
    claim(book, renewed)
    clock.now += 1000.0
    assert book.is_current(ticket.handoff_id, 2)  # claimed in time: the receiver's deadlines rule from here


def test_close_forgets() -> None:
    book, _ = make_book()
    ticket = book.issue("r", IDENTITY, 4, False)
    assert len(book) == 1
    book.close(ticket.handoff_id)
    book.close(ticket.handoff_id)
    assert len(book) == 0
    assert not book.is_current(ticket.handoff_id, 1)
    assert reason_of(book, ticket) == (Refused, "TICKET_UNKNOWN")
    with pytest.raises(Refused):
        book.reissue(ticket.handoff_id)


def test_logits_only_takes_no_tokens() -> None:
    book, _ = make_book()
    ticket = book.issue("r", IDENTITY, 0, True)
    found = book.claim(make_opening(ticket, IDENTITY, CONTRACT, logits_only=True), CONTRACT)
    assert (found.start, found.end) == (9, 9)


def test_a_ticket_for_other_tokens_than_held_is_our_own_fault() -> None:
    book, _ = make_book()
    with pytest.raises(Internal):
        book.issue("r", IDENTITY, 3, False)
    assert len(book) == 0
