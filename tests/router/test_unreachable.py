"""Workers whose records lead nowhere: the router goes round them, and says so when there is nobody else."""

from __future__ import annotations

import pytest

from pdserve.errors import Unavailable
from pdserve.registry.records import DECODE, PREFILL
from router.wire import WORKER_LOST
from tests.engine.tiny import prompt
from tests.router.support import VOCAB, finish_of, house, record_of

IDS = prompt(20, seed=3, vocab=VOCAB)

ADDRESSES = pytest.mark.parametrize("address", ["myhost", "192.0.2.1:5000"])  # no port; plaintext beyond this machine


@ADDRESSES
@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_request_moves_on_from_a_worker_that_no_channel_leads_to(role: str, address: str) -> None:
    async with house() as made:
        await made.add_ghost("ghost", role, address)
        busy = made.make_look_busy("p0" if role == PREFILL else "d0")
        events = await made.generate(IDS, max_tokens=4, ignore_eos=True)
        assert finish_of(events).usage.output_tokens == 4
        assert record_of(events).attempts == 2
        assert any("ghost" in note and WORKER_LOST in note for note in record_of(events).notes)
        assert not made.router.pool.is_ready(made.member("ghost"))
        made.router.pool.end(busy)


@ADDRESSES
async def test_without_another_worker_it_is_unavailable(address: str) -> None:
    async with house(decodes=0) as made:
        await made.add_ghost("ghost", DECODE, address)
        with pytest.raises(Unavailable) as caught:
            await made.generate(IDS)
        assert (caught.value.reason, caught.value.field) == (WORKER_LOST, "worker")
        assert address in str(caught.value)
