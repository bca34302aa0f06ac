"""Handoffs that end early: cancelled, failed, fenced, revoked. Nothing writes or leaks afterwards."""

from __future__ import annotations

import asyncio

import pytest

from cache_transfer.opening import make_opening
from pdserve.errors import (
    Cancelled,
    Exhausted,
    Fenced,
    PdserveError,
    Unavailable,
)
from tests.cache_transfer.endings import TOKENS, both_transports, check_aborted, start_gated
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import check_same, make_pair, random_cache


@both_transports
async def test_a_cancelled_sender_ends_the_attempt(kind: str) -> None:
    async with make_pair(kind) as pair:
        _, running = await start_gated(pair)
        running.cancel()
        pair.host.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await check_aborted(pair, Cancelled)


@both_transports
async def test_pages_are_not_given_back_while_a_thread_writes(kind: str) -> None:
    async with make_pair(kind) as pair:
        handoff_id, running = await start_gated(pair)
        pair.book.close(handoff_id)
        revoking = asyncio.create_task(pair.receiver.revoke(handoff_id))
        done, _ = await asyncio.wait({revoking, running}, timeout=0)
        assert not done
        assert pair.host.failed == []
        pair.host.gate.set()
        async with asyncio.timeout(WAIT_S):
            await revoking
        sink = pair.host.sinks[handoff_id, 1]
        assert sink.closed
        writes = sink.writes
        with pytest.raises(Fenced) as caught:
            await running
        assert caught.value.reason == "ATTEMPT_STALE"
        assert sink.writes == writes
        await check_aborted(pair, Fenced)


@both_transports
async def test_a_reissued_attempt_takes_over(kind: str) -> None:
    """The old attempt is fenced by the book alone; the new one gets pages when the old has drained."""
    async with make_pair(kind) as pair:
        handoff_id, old = await start_gated(pair)
        pair.host.gated = False
        ticket = pair.book.reissue(handoff_id)
        revoking = asyncio.create_task(pair.receiver.revoke(handoff_id))
        pair.host.asked.clear()
        identity = pair.issue(TOKENS)[1]
        sender = pair.sender(ticket, identity, pair.source(TOKENS, seed=2))
        new = asyncio.create_task(sender.run())
        pair.announce_all(sender, TOKENS)
        pair.host.gate.set()
        async with asyncio.timeout(WAIT_S):
            await revoking
        with pytest.raises(Fenced):
            await old
        async with asyncio.timeout(WAIT_S):
            await new
        check_same(pair.host.sinks[handoff_id, 2].content(TOKENS), random_cache(pair.sends, TOKENS, seed=2))
        assert [(claim.attempt, type(error)) for claim, error in pair.host.failed] == [(1, Fenced)]
        assert [claim.attempt for claim, _, _ in pair.host.done] == [2]
        await pair.check_next_handoff_works()


@both_transports
async def test_frames_after_a_reissue_are_fenced_without_revoke(kind: str) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        running = asyncio.create_task(sender.run())
        async with asyncio.timeout(WAIT_S):
            await pair.host.asked.wait()
        pair.book.reissue(ticket.handoff_id)
        pair.announce_all(sender, TOKENS)
        with pytest.raises(Fenced) as caught:
            await running
        assert caught.value.reason == "ATTEMPT_STALE"
        assert all(sink.writes == 0 for sink in pair.host.sinks.values())
        await check_aborted(pair, Fenced)


@both_transports
async def test_revoke_ends_a_wait_for_pages(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.host.may_grant.clear()
        ticket, identity = pair.issue(TOKENS)
        running = asyncio.create_task(pair.sender(ticket, identity, pair.source(TOKENS)).run())
        async with asyncio.timeout(WAIT_S):
            await pair.host.asked.wait()
            await pair.receiver.revoke(ticket.handoff_id)
        with pytest.raises(Fenced):
            await running
        await check_aborted(pair, Fenced)


@both_transports
@pytest.mark.parametrize("refusal", [Exhausted("no pages"), Cancelled("the client left"), Unavailable("draining")])
async def test_a_refused_grant_reaches_the_sender(kind: str, refusal: PdserveError) -> None:
    async with make_pair(kind) as pair:
        pair.host.refusal = refusal
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        pair.announce_all(sender, TOKENS)
        with pytest.raises(type(refusal)) as caught:
            await sender.run()
        assert caught.value.message == refusal.message
        await check_aborted(pair, type(refusal))


@both_transports
async def test_a_failed_prefill_ends_the_handoff(kind: str) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        running = asyncio.create_task(sender.run())
        sender.computed(0, (0, TOKENS))
        async with asyncio.timeout(WAIT_S):
            await pair.host.asked.wait()
        await asyncio.to_thread(sender.fail, Cancelled("the client left"))
        with pytest.raises(Cancelled, match="the client left"):
            await running
        await check_aborted(pair, Cancelled)


async def test_a_server_that_stops_cancels_its_handoffs() -> None:
    async with make_pair("grpc") as pair:
        _, running = await start_gated(pair)
        pair.host.gate.set()
        assert pair.server is not None
        await pair.server.stop()
        with pytest.raises((Unavailable, Cancelled)):
            await running
        async with asyncio.timeout(WAIT_S):
            await pair.host.over.wait()
        assert [type(error) for _, error in pair.host.failed] == [Cancelled]
        pair.check_nothing_left()


async def test_nobody_listens() -> None:
    async with make_pair("grpc") as pair:
        assert pair.server is not None
        await pair.server.stop()
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        with pytest.raises(Unavailable, match=pair.address):
            await sender.run()


async def test_a_vanished_sender_is_noticed() -> None:
    """A stream that breaks off without a word, after its grant."""
    async with make_pair("memory") as pair:
        ticket, identity = pair.issue(TOKENS)
        stream = pair.transport.open(WAIT_S)
        await stream.send(make_opening(ticket, identity, pair.sends, logits_only=False))
        await stream.receive()
        await stream.close()
        await check_aborted(pair, Cancelled)
