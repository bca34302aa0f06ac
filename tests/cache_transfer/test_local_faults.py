"""Sources, sinks and owners of a handoff that do what they must not: a typed error, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import (
    Cancelled,
    Internal,
    PdserveError,
)
from tests.cache_transfer.endings import TOKENS, both_transports, check_aborted
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import logits_of, make_pair


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
            async with asyncio.timeout(WAIT_S):
                await pair.host.over.wait()
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
