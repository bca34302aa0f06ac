"""A handoff that ends while its receiver is writing an answer: the sender hears of it at once, not at its deadline."""

from __future__ import annotations

import asyncio

import pytest

from cache_transfer.pages import PageSink
from cache_transfer.receiver import Receiver
from cache_transfer.tickets import Claim
from pdserve.errors import Fenced
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import Host, make_pair


class RevokedAtTheGrant(Host):
    """The attempt is revoked in the step of the event loop in which its grant begins to be written."""

    receiver: Receiver
    steps: int
    revoking: asyncio.Task[None]

    async def grant(self, claim: Claim) -> PageSink:
        sink = await super().grant(claim)
        loop = asyncio.get_running_loop()

        def later(left: int) -> None:
            if left:
                loop.call_soon(later, left - 1)
                return
            self.revoking = asyncio.create_task(self.receiver.revoke(claim.handoff_id))

        loop.call_soon(later, self.steps)
        return sink


@pytest.mark.parametrize("kind", ["grpc", "memory", "shared"])
@pytest.mark.parametrize("steps", range(6))
async def test_an_attempt_revoked_while_its_grant_is_written(kind: str, steps: int) -> None:
    async with make_pair(kind) as pair:
        host = RevokedAtTheGrant(pair.takes)
        host.receiver, host.steps = pair.receiver, steps
        pair.receiver._host = host
        ticket, identity = pair.issue(8)
        sender = pair.sender(ticket, identity, pair.source(8), deadline_s=6 * WAIT_S)
        with pytest.raises(Fenced) as caught:
            async with asyncio.timeout(WAIT_S):
                await sender.run()
        assert caught.value.reason == "ATTEMPT_STALE"
        await host.revoking
        assert [type(error) for _, error in host.failed] == [Fenced]
        pair.receiver._host = pair.host
        await pair.check_next_handoff_works()
