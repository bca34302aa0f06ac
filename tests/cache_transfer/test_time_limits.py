"""Every wait of a handoff has an end, on both sides."""

from __future__ import annotations

import asyncio

import pytest

from cache_transfer.memory import _ReceiverEnd
from cache_transfer.messages import Ack, Response
from cache_transfer.receiver import ReceiverSettings
from pdserve.errors import (
    DeadlineExceeded,
)
from tests.cache_transfer.endings import TOKENS, both_transports, check_aborted
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import make_pair


@both_transports
async def test_a_sender_has_a_deadline(kind: str) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS), deadline_s=0.2)
        with pytest.raises(DeadlineExceeded):
            await sender.run()
        async with asyncio.timeout(WAIT_S):
            await pair.host.over.wait()
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
