"""Real processes that are killed: workers, one by one, and Redis below all of them."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.client import AsyncClient
from pdserve.client.events import Completion, Event, Tokens, collect
from pdserve.engine.engine import Engine
from pdserve.engine.plan import EngineConfig
from pdserve.errors import Unavailable
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from router.wire import WORKER_LOST
from tests.e2e.processes import (
    LEASE_S,
    START_S,
    WAIT_S,
    WORKERS,
    Installation,
    check_free,
    installation,
    model,
    names,
    until,
)
from tests.e2e.stack import read_tokens
from tests.engine.tiny import prompt

pytestmark = [pytest.mark.slow, pytest.mark.redis]

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=24)
LONG = SamplingParams(temperature=0, seed=0, max_tokens=400, ignore_eos=True)
PROMPTS = [prompt(20 + 9 * n, seed=n) for n in range(6)]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installation(tmp_path_factory.mktemp("house")) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """What one process answers."""
    return one_process(GREEDY)


def one_process(params: SamplingParams) -> list[tuple[int, ...]]:
    engine = Engine(model(), EngineConfig(dtype="fp32", pages=2000, page_size=4, deterministic=True))
    return [output.ids for output in LocalRunner(engine).generate_batch(PROMPTS, params)]


@pytest_asyncio.fixture
async def client(house: Installation) -> AsyncIterator[AsyncClient]:
    """Everybody is here; at the end the dead are forgotten, and nobody who is left holds a page."""
    await asyncio.to_thread(house.revive)
    async with AsyncClient(house.address) as it:
        await until(it, lambda s: names(s) == WORKERS and all(w.state == "ready" for w in s.workers))
        yield it
        await until(it, lambda s: names(s) == tuple(n for n in WORKERS if house.workers[n].alive))
        await check_free(it)


async def ask(client: AsyncClient, ids: Sequence[int]) -> Completion:
    return await client.complete(token_ids=ids, sampling=GREEDY, want_record=True, timeout_s=WAIT_S)


async def ask_all(client: AsyncClient) -> list[Completion]:
    return list(await asyncio.gather(*(ask(client, ids) for ids in PROMPTS)))


async def test_the_installation_equals_one_process(client: AsyncClient, expected: list[tuple[int, ...]]) -> None:
    for _ in ("cold", "warm"):
        answers = await ask_all(client)
        assert [answer.ids for answer in answers] == expected
        records = [answer.record for answer in answers if answer.record is not None]
        assert {record.prefill_worker for record in records} == {"p0", "p1"}
        assert {record.decode_worker for record in records} == {"d0", "d1"}
    status = await client.status()
    assert status.registry.startswith("redis://") and not status.registry_warning


@pytest.mark.parametrize("doomed", ["p0", "d0"])
async def test_requests_before_their_first_token_succeed_elsewhere(
    house: Installation, client: AsyncClient, expected: list[tuple[int, ...]], doomed: str
) -> None:
    """The worker stands still with requests on it, and is then killed."""
    await ask_all(client)  # every connection is up
    house.workers[doomed].send(signal.SIGSTOP)
    try:
        waiting = [asyncio.create_task(ask(client, ids)) for ids in PROMPTS]
        # The router's own count, since the worker reports nothing.
        await until(client, lambda s: any(w.load.waiting + w.load.running for w in s.workers if w.worker_id == doomed))
    finally:
        house.workers[doomed].kill()
    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(*waiting)
    assert [answer.ids for answer in answers] == expected
    records = [answer.record for answer in answers if answer.record is not None]
    moved = [record for record in records if record.attempts > 1]
    assert moved and all(doomed in record.notes[0] and WORKER_LOST in record.notes[0] for record in moved)
    assert doomed not in {name for record in records for name in (record.prefill_worker, record.decode_worker)}


async def test_streams_of_a_killed_worker_go_on_at_another_and_it_is_out_within_its_lease(
    house: Installation, client: AsyncClient, expected: list[tuple[int, ...]]
) -> None:
    """Prefill worker p0 dies with decode worker d0: nobody notices, neither those who stream from d1."""
    killed = asyncio.Event()

    async def stream(ids: Sequence[int]) -> Completion:
        """The whole answer, of which the first token came before the kill."""
        asked = client.generate(token_ids=ids, sampling=LONG, want_record=True, timeout_s=2 * WAIT_S)
        async with aclosing(asked) as events:
            got = [await anext(events)]
            while not isinstance(got[-1], Tokens):
                got.append(await anext(events))
            begun.release()
            await killed.wait()
            got += [event async for event in events]
        return collect(got)

    begun = asyncio.Semaphore(0)
    streams = asyncio.gather(*(stream(ids) for ids in PROMPTS))
    for _ in PROMPTS:
        async with asyncio.timeout(WAIT_S):
            await begun.acquire()
    house.workers["d0"].kill()
    house.workers["p0"].kill()
    at = time.monotonic()
    killed.set()
    await until(client, lambda s: names(s) == ("d1", "p1"), LEASE_S + 1.0)
    assert time.monotonic() - at < LEASE_S + 1.0

    async with asyncio.timeout(2 * WAIT_S):
        results = await streams
    assert [answer.ids for answer in results] == await asyncio.to_thread(one_process, LONG)
    records = [answer.record for answer in results if answer.record is not None]
    moved = [record for record in records if record.attempts > 1]
    assert 0 < len(moved) < len(PROMPTS) == len(records)
    assert {record.decode_worker for record in records} == {"d1"}
    for record in moved:
        assert record.history[0].outcome == WORKER_LOST and record.history[0].failed_worker == "d0"
        assert record.history[0].output_tokens == record.history[-1].first_index > 0
    assert [answer.ids for answer in await ask_all(client)] == expected  # by the two that are left


async def test_serving_goes_on_without_redis(
    house: Installation, client: AsyncClient, expected: list[tuple[int, ...]]
) -> None:
    house.redis.kill()
    try:
        status = await until(client, lambda s: bool(s.registry_warning))
        assert "registry" in status.registry_warning and house.redis.address in status.registry_warning
        # Also when every lease would have ended.
        end = time.monotonic() + LEASE_S + 1.0
        while time.monotonic() < end:
            assert [answer.ids for answer in await ask_all(client)] == expected
        assert names(await client.status()) == WORKERS
    finally:
        house.redis.start()
    await until(client, lambda s: not s.registry_warning and names(s) == WORKERS)
    assert [answer.ids for answer in await ask_all(client)] == expected


async def test_a_terminated_worker_lets_its_stream_finish(
    house: Installation, client: AsyncClient, expected: list[tuple[int, ...]]
) -> None:
    events: AsyncIterator[Event]
    async with aclosing(client.generate(token_ids=PROMPTS[0], sampling=GREEDY, timeout_s=WAIT_S)) as events:
        ids = await read_tokens(events, 1)
        for name in ("d0", "d1"):
            house.workers[name].send(signal.SIGTERM)
        async for event in events:
            ids += event.ids if isinstance(event, Tokens) else ()
    assert ids == expected[0]
    for name in ("d0", "d1"):
        assert await asyncio.to_thread(house.workers[name].wait) == 0
    await until(client, lambda s: names(s) == ("p0", "p1"), LEASE_S)  # they said goodbye
    with pytest.raises(Unavailable) as caught:
        await ask(client, PROMPTS[0])
    assert caught.value.reason == "NO_DECODE_WORKER"


def test_redis_down_at_start_is_one_clear_error(tmp_path: Path, house: Installation) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        for module in ("router", "prefill_worker", "decode_worker"):
            command = [sys.executable, "-m", module, "--config", str(house.config), "--registry", url]
            started[module] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
            )
        ends = {module: (*process.communicate(timeout=START_S), process) for module, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    for module, (out, err, process) in ends.items():
        assert process.returncode > 0 and out == ""
        (line,) = err.splitlines()
        assert line.startswith(f"{module}: registry.url: ") and url.removesuffix("/0") in line
        assert "start Redis there" in line
