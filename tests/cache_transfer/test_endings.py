"""Handoffs that end early: cancelled, failed, late, revoked. Nothing writes or leaks afterwards."""

from __future__ import annotations

import asyncio

import pytest

from cache_transfer.memory import _ReceiverEnd
from cache_transfer.messages import Ack, Response
from cache_transfer.receiver import ReceiverSettings
from cache_transfer.tickets import make_opening
from cache_transfer.waiting import Deadline, settle
from pdserve.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    Fenced,
    Internal,
    PdserveError,
    Unavailable,
)
from tests.cache_transfer.support import WAIT_S, Pair, check_same, logits_of, make_pair, random_cache

both_transports = pytest.mark.parametrize("kind", ["grpc", "memory"])
TOKENS = 8


async def start_gated(pair: Pair) -> tuple[bytes, asyncio.Task[object]]:
    """A running handoff whose first write waits in a thread; later layers are not announced."""
    pair.host.gated = True
    ticket, identity = pair.issue(TOKENS)
    sender = pair.sender(ticket, identity, pair.source(TOKENS))
    running: asyncio.Task[object] = asyncio.create_task(sender.run())
    sender.computed(0, (0, TOKENS))
    assert await asyncio.to_thread(pair.host.writing.wait, WAIT_S)
    return ticket.handoff_id, running


async def check_aborted(pair: Pair, error: type[PdserveError]) -> None:
    """The host was told once, after the last write."""
    await asyncio.wait_for(pair.host.over.wait(), WAIT_S)
    assert [type(e) for _, e in pair.host.failed] == [error]
    assert pair.host.done == []
    await pair.check_next_handoff_works()


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
        await asyncio.wait_for(revoking, WAIT_S)
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
        await asyncio.wait_for(revoking, WAIT_S)
        with pytest.raises(Fenced):
            await old
        await asyncio.wait_for(new, WAIT_S)
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
        await asyncio.wait_for(pair.host.asked.wait(), WAIT_S)
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
        await asyncio.wait_for(pair.host.asked.wait(), WAIT_S)
        await asyncio.wait_for(pair.receiver.revoke(ticket.handoff_id), WAIT_S)
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
        await asyncio.wait_for(pair.host.asked.wait(), WAIT_S)
        await asyncio.to_thread(sender.fail, Cancelled("the client left"))
        with pytest.raises(Cancelled, match="the client left"):
            await running
        await check_aborted(pair, Cancelled)


@both_transports
async def test_a_sender_has_a_deadline(kind: str) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS), deadline_s=0.2)
        with pytest.raises(DeadlineExceeded):
            await sender.run()
        await asyncio.wait_for(pair.host.over.wait(), WAIT_S)
        assert len(pair.host.failed) == 1
        await pair.check_next_handoff_works()


@both_transports
async def test_an_idle_sender_is_given_up(kind: str) -> None:
    async with make_pair(kind, settings=ReceiverSettings(idle_timeout_s=0.2)) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        sender.computed(0, (0, TOKENS))
        with pytest.raises(DeadlineExceeded, match="a frame"):
            await sender.run()
        await check_aborted(pair, DeadlineExceeded)


@both_transports
async def test_a_grant_waits_no_longer_than_the_ticket(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.host.may_grant.clear()
        ticket, identity = pair.issue(TOKENS)
        pair.clock.now += 29.9  # 0.1 s are left
        with pytest.raises(DeadlineExceeded, match="pages"):
            await pair.sender(ticket, identity, pair.source(TOKENS)).run()
        await check_aborted(pair, DeadlineExceeded)


@both_transports
async def test_a_stream_that_says_nothing_is_given_up(kind: str) -> None:
    async with make_pair(kind, settings=ReceiverSettings(open_timeout_s=0.1)) as pair:
        stream = pair.transport.open(WAIT_S)
        with pytest.raises(DeadlineExceeded, match="first message"):
            await stream.receive()
        await stream.close()
        assert pair.host.failed == []
        await pair.check_next_handoff_works()


@both_transports
async def test_a_source_that_fails_is_reported(kind: str) -> None:
    class Broken:
        def read(self, *_: object) -> list[memoryview]:
            raise Internal("pages are gone")

    class Short:
        def read(self, *_: object) -> list[memoryview]:
            return [memoryview(b"abc")]

    async with make_pair(kind) as pair:
        for source in (Broken(), Short()):
            ticket, identity = pair.issue(TOKENS)
            sender = pair.sender(ticket, identity, source)
            pair.announce_all(sender, TOKENS)
            with pytest.raises(Internal):
                await sender.run()
            await asyncio.wait_for(pair.host.over.wait(), WAIT_S)
            pair.host.over.clear()
        assert [type(error) for _, error in pair.host.failed] == [Cancelled, Cancelled]
        await pair.check_next_handoff_works()


@both_transports
async def test_a_sink_that_fails_is_reported(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.host.gated = True
        pair.host.gate.set()
        pair.host.write_error = OSError("bad memory")
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        pair.announce_all(sender, TOKENS)
        with pytest.raises(Internal, match="bad memory"):
            await sender.run()
        pair.host.write_error = None
        await check_aborted(pair, Internal)


async def test_a_server_that_stops_cancels_its_handoffs() -> None:
    async with make_pair("grpc") as pair:
        _, running = await start_gated(pair)
        pair.host.gate.set()
        assert pair.server is not None
        await pair.server.stop()
        with pytest.raises((Unavailable, Cancelled)):
            await running
        await asyncio.wait_for(pair.host.over.wait(), WAIT_S)
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


async def test_a_late_announcement_is_harmless() -> None:
    async with make_pair("memory") as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        pair.announce_all(sender, TOKENS)
        await sender.run()
        sender.computed(0, (0, TOKENS))
        sender.fail(Internal("too late"))
        with pytest.raises(Internal, match="once"):
            await sender.run()


async def test_a_layer_that_does_not_exist_is_an_error() -> None:
    async with make_pair("memory") as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        sender.computed(3, (0, TOKENS))
        with pytest.raises(Internal, match="layer 3"):
            await sender.run()
        await pair.check_next_handoff_works()


async def test_wrong_logits_are_refused_by_size() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        for layer in range(3):
            sender.computed(layer, (0, TOKENS))
        dtype, data = logits_of(pair.sends)
        sender.logits(dtype, data + data, TOKENS - 1)
        with pytest.raises(PdserveError) as caught:
            await sender.run()
        assert caught.value.reason == "LOGITS_SIZE"
        assert len(pair.host.failed) == 1
        await pair.check_next_handoff_works()


async def test_deadline_reports_what_was_waited_for() -> None:
    deadline = Deadline(WAIT_S)
    with pytest.raises(DeadlineExceeded, match="the moon"):
        async with deadline:
            deadline.extend(0.0, "the moon")
            await asyncio.Event().wait()


async def test_deadline_keeps_the_first_interruption() -> None:
    deadline = Deadline(WAIT_S)
    deadline.interrupt(DataLoss("first"))
    deadline.interrupt(DataLoss("second"))
    with pytest.raises(DataLoss, match="first"):
        async with deadline:
            pass


async def test_settle_outlasts_cancellation() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(settle((future,)))
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0)
    assert not done
    future.set_exception(DataLoss("seen"))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_acknowledgement_that_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(self: _ReceiverEnd, message: Response) -> None:
        if isinstance(message, Ack):
            await asyncio.Event().wait()  # the sender's window stays closed
        self.responses.put_nowait(message)

    monkeypatch.setattr(_ReceiverEnd, "write", write)
    async with make_pair("memory", settings=ReceiverSettings(idle_timeout_s=0.2)) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        pair.announce_all(sender, TOKENS)
        with pytest.raises(DeadlineExceeded, match="the acknowledgement"):
            await sender.run()
        assert pair.receiver.active == 0 and len(pair.host.done) == 1
