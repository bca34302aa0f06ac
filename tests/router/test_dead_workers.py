"""Worker processes that are killed in the middle of their work."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.client import AsyncClient
from pdserve.errors import Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from router.backlog import Event
from router.request import Ask, TokenPrompt
from router.wire import WORKER_LOST
from tests.engine.tiny import prompt
from tests.router.support import LONG_CONTEXT, REGISTRY, VOCAB, House, house, ids_of, model, record_of
from tests.router.worker_process import LONG_ENGINE

IDS = prompt(40, seed=9, vocab=VOCAB)


@asynccontextmanager
async def process(
    made: House, role: str, worker_id: str, lease_s: float = REGISTRY.lease_s
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker process that has registered with the router's embedded registry, over gRPC."""
    arguments = (role, worker_id, f"grpc://{made.router.address}", str(lease_s))
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.router.worker_process", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(60):
            line = await worker.stdout.readline()
        assert line == b"ready\n"
        await made.router.pool.refresh()
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


async def gone(made: House, worker_id: str) -> None:
    """Returns when the router no longer lists the worker."""
    async with asyncio.timeout(REGISTRY.lease_s + 5), AsyncClient(made.router.address) as client:
        while worker_id in [worker.worker_id for worker in (await client.status()).workers]:
            continue


async def test_a_decode_worker_killed_after_its_first_token_is_a_typed_error() -> None:
    async with house(prefills=0, decodes=0) as made:
        await made.add_prefill("p0", of=model(context=LONG_CONTEXT), engine=LONG_ENGINE)
        async with process(made, DECODE, "doomed") as doomed:
            params = SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=LONG_CONTEXT
            )  # all that the context leaves
            request = await made.router.intake.take(Ask(TokenPrompt(IDS), params))
            events: list[Event] = []
            with pytest.raises(Unavailable) as caught:
                async for event in made.router.orchestrator.generate(request):
                    events.append(event)
                    if isinstance(event, TokenBatch) and doomed.returncode is None:
                        doomed.kill()
                        await doomed.wait()
            assert caught.value.reason == WORKER_LOST
            assert 0 < len(ids_of(events)) < request.max_tokens
            assert not any(isinstance(event, Finish) for event in events)
            assert [m.id for m in made.router.pool.ready("tiny")] == ["p0"]  # out at once
            await gone(made, "doomed")  # and forgotten when its lease is over


async def test_a_prefill_worker_killed_at_work_is_replaced_before_the_first_token() -> None:
    async with house(prefills=0, decodes=0) as made:
        await made.add_prefill("p0", of=model(context=LONG_CONTEXT), engine=LONG_ENGINE)
        await made.add_decode("d0", of=model(context=LONG_CONTEXT), engine=LONG_ENGINE)
        expected = ids_of(await made.generate(IDS, max_tokens=10))
        async with process(made, PREFILL, "doomed") as doomed:
            made.make_look_busy("p0")
            await made.router.channels.get(made.member("doomed").address).channel_ready()
            doomed.send_signal(signal.SIGSTOP)  # it takes the call and never answers
            answer = asyncio.create_task(made.generate(IDS, max_tokens=10))
            async with asyncio.timeout(5):
                while made.decodes[0].record().load.waiting == 0:  # the request has its ticket
                    await made.decodes_reachable()
            doomed.kill()
            async with asyncio.timeout(20):
                events = await answer
            assert ids_of(events) == expected
            assert (record_of(events).attempts, record_of(events).prefill_worker) == (2, "p0")
            assert any("doomed" in note and WORKER_LOST in note for note in record_of(events).notes)
