"""Openings that must be refused before anything is claimed: the ticket stays, the host hears nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cache_transfer.contract import CachePlane, prompt_digest
from cache_transfer.messages import PushOpening
from cache_transfer.push import decode_request
from pdserve.errors import DataLoss, Fenced, Incompatible, InvalidRequest, PdserveError, Refused
from tests.cache_transfer.by_hand import Requests, make_stream, push_bytes
from tests.cache_transfer.changes import TOKENS, check_not_claimed, name_of, open_stream, wire
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import Pair, make_pair, random_cache

Attack = tuple[Requests, bytes]  # a stream, and the secret of the ticket that it abuses


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_a_ticket_is_claimed_once(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        await push_bytes(pair, wire(requests))
        with pytest.raises(Fenced) as caught:
            await push_bytes(pair, wire(requests))
        assert caught.value.reason == "TICKET_USED"
        assert (len(pair.host.done), pair.host.failed) == (1, [])
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_a_stale_attempt_is_fenced(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        pair.book.reissue(requests[0].open.handoff_id)
        await check_not_claimed(pair, wire(requests), Fenced, "ATTEMPT_STALE")
        requests[0].open.attempt = 3
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_UNKNOWN")
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_another_start_of_the_worker_is_fenced(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        requests[0].open.incarnation = b"j" * 16
        await check_not_claimed(pair, wire(requests), Fenced, "INCARNATION")
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_an_expired_or_closed_ticket_is_refused(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        pair.clock.now += 30.0
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_EXPIRED")
        pair.book.close(requests[0].open.handoff_id)
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_UNKNOWN")
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("tenant", "other"), ("prompt_digest", b"q" * 32), ("adapter_digest", b"a" * 32), ("end", 9), ("start", 1)],
)
async def test_another_identity_is_refused_by_field(kind: str, field: str, value: object) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(TOKENS)
        changed = replace(identity, **{field: value})  # type: ignore[arg-type]
        requests = make_stream(ticket, changed, pair.sends, random_cache(pair.sends, 9))
        error = await check_not_claimed(pair, wire(requests), Incompatible, "IDENTITY_MISMATCH")
        assert [d.code for d in error.differences] == [f"IDENTITY.{field}"]
        await pair.check_next_handoff_works()


async def test_an_identity_without_proof_is_refused() -> None:
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        requests[0].open.identity.tenant = "other"
        await check_not_claimed(pair, wire(requests), DataLoss, "PROOF")
        await pair.check_next_handoff_works()


async def test_another_contract_is_refused_by_field() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(TOKENS)
        planes = (*pair.sends.planes[:2], (CachePlane("k", 3, 4), CachePlane("v", 3, 8)))
        other = replace(pair.sends, planes=planes, vocab_size=12)
        requests = make_stream(ticket, identity, other, random_cache(other, TOKENS))
        error = await check_not_claimed(pair, wire(requests), Incompatible, "CONTRACT_MISMATCH")
        codes = [d.code for d in error.differences]
        assert codes == ["PLANES[2].v.head_dim", "VOCAB_SIZE"]
        await pair.check_next_handoff_works()


@pytest.mark.parametrize(
    ("field", "value", "error", "reason"),
    [
        ("integrity", "crc32", InvalidRequest, "INTEGRITY"),
        ("integrity", "", InvalidRequest, "INTEGRITY"),
        ("kv_dtype", "fp16", Incompatible, "KV_DTYPE"),
        ("logits_only", True, InvalidRequest, "LOGITS_ONLY"),
        ("proof", b"", InvalidRequest, "MALFORMED_MESSAGE"),
        ("handoff_id", b"", Refused, "TICKET_UNKNOWN"),
    ],
)
async def test_an_opening_that_does_not_fit_is_refused(
    field: str, value: object, error: type[PdserveError], reason: str
) -> None:
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        setattr(requests[0].open, field, value)
        await check_not_claimed(pair, wire(requests), error, reason)
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("missing_field", ["identity", "contract"])
async def test_an_opening_must_be_complete(missing_field: str) -> None:
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        requests[0].open.ClearField(missing_field)
        await check_not_claimed(pair, wire(requests), InvalidRequest, "MALFORMED_MESSAGE")
        await pair.check_next_handoff_works()


async def test_refusals_are_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async with make_pair("memory") as pair:
        requests, secret = open_stream(pair)
        pair.clock.now += 30.0
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_EXPIRED")
        assert "TICKET_EXPIRED" in caplog.text
        assert requests[0].open.handoff_id.hex() in caplog.text
        for text in (secret.hex(), repr(secret), requests[0].open.proof.hex()):
            assert text not in caplog.text


def another_tenants_ticket(pair: Pair) -> Attack:
    """Somebody got hold of the whole ticket, secret included, and states a cache of their own."""
    ticket, identity = pair.issue(TOKENS)
    own = replace(identity, tenant="other")
    return make_stream(ticket, own, pair.sends, random_cache(pair.sends, TOKENS)), ticket.secret


def another_requests_prompt(pair: Pair) -> Attack:
    ticket, identity = pair.issue(TOKENS)
    own = replace(identity, prompt_digest=prompt_digest((7,) * TOKENS))
    return make_stream(ticket, own, pair.sends, random_cache(pair.sends, TOKENS)), ticket.secret


def a_guessed_secret(pair: Pair) -> Attack:
    ticket, identity = pair.issue(TOKENS)
    guess = replace(ticket, secret=b"g" * 32)
    return make_stream(guess, identity, pair.sends, random_cache(pair.sends, TOKENS)), ticket.secret


def the_secret_of_another_handoff(pair: Pair) -> Attack:
    ticket, identity = pair.issue(TOKENS)
    other, _ = pair.issue(TOKENS)
    mixed = replace(ticket, secret=other.secret)
    return make_stream(mixed, identity, pair.sends, random_cache(pair.sends, TOKENS)), ticket.secret


def an_earlier_attempt(pair: Pair) -> Attack:
    requests, secret = open_stream(pair)
    pair.book.reissue(requests[0].open.handoff_id)
    return requests, secret


def the_next_attempt_with_the_old_secret(pair: Pair) -> Attack:
    requests, secret = open_stream(pair)
    pair.book.reissue(requests[0].open.handoff_id)
    requests[0].open.attempt = 2
    return requests, secret


def an_attempt_that_was_never_issued(pair: Pair) -> Attack:
    requests, secret = open_stream(pair)
    requests[0].open.attempt = 2
    return requests, secret


def an_earlier_start_of_the_worker(pair: Pair) -> Attack:
    requests, secret = open_stream(pair)
    requests[0].open.incarnation = b"j" * 16
    return requests, secret


def an_expired_ticket(pair: Pair) -> Attack:
    attack = open_stream(pair)
    pair.clock.now += 30.0
    return attack


def a_closed_handoff(pair: Pair) -> Attack:
    requests, secret = open_stream(pair)
    pair.book.close(requests[0].open.handoff_id)
    return requests, secret


def an_invented_handoff(pair: Pair) -> Attack:
    requests, secret = open_stream(pair)
    requests[0].open.handoff_id = b"?" * 16
    return requests, secret


ATTACKS: list[tuple[Callable[[Pair], Attack], type[PdserveError], str]] = [
    (another_tenants_ticket, Incompatible, "IDENTITY_MISMATCH"),
    (another_requests_prompt, Incompatible, "IDENTITY_MISMATCH"),
    (a_guessed_secret, DataLoss, "PROOF"),
    (the_secret_of_another_handoff, DataLoss, "PROOF"),
    (an_earlier_attempt, Fenced, "ATTEMPT_STALE"),
    (the_next_attempt_with_the_old_secret, DataLoss, "PROOF"),
    (an_attempt_that_was_never_issued, Refused, "TICKET_UNKNOWN"),
    (an_earlier_start_of_the_worker, Fenced, "INCARNATION"),
    (an_expired_ticket, Refused, "TICKET_EXPIRED"),
    (a_closed_handoff, Refused, "TICKET_UNKNOWN"),
    (an_invented_handoff, Refused, "TICKET_UNKNOWN"),
]


@pytest.mark.parametrize("kind", ["grpc", "memory"])
@pytest.mark.parametrize(("attack", "error", "reason"), ATTACKS, ids=name_of)
async def test_a_stolen_old_or_invented_ticket_is_refused_and_logged(
    kind: str,
    attack: Callable[[Pair], Attack],
    error: type[PdserveError],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with make_pair(kind) as pair:
        requests, secret = attack(pair)
        await check_not_claimed(pair, wire(requests), error, reason)
        (said,) = [record.getMessage() for record in caplog.records if record.name == "cache_transfer.tickets"]
        assert requests[0].open.handoff_id.hex() in said and reason in said
        for text in (secret.hex(), repr(secret), requests[0].open.proof.hex()):
            assert text not in caplog.text
        await pair.check_next_handoff_works()


async def test_a_replayed_opening_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The same bytes again, while the first stream runs and after it."""
    async with make_pair("memory") as pair:
        requests, _ = open_stream(pair)
        first = pair.transport.open(WAIT_S)
        opening = decode_request(requests[0].SerializeToString())
        assert isinstance(opening, PushOpening)
        await first.send(opening)
        assert await first.receive() is not None  # the grant
        for _ in range(2):
            with pytest.raises(Fenced) as caught:
                await push_bytes(pair, wire(requests))
            assert caught.value.reason == "TICKET_USED"
            await first.close()
        assert caplog.text.count("TICKET_USED") == 2
        await pair.check_next_handoff_works()
