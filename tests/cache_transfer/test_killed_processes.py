"""Either end of a handoff through shared memory is killed in the middle of it: nothing is left of it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache_transfer.rings import Rings
from cache_transfer.sender import HandoffSender
from cache_transfer.transport import RECEIVER_LOST, GrpcTransport
from pdserve.errors import Cancelled, Unavailable
from pdserve.rpc.channel import channel
from tests.cache_transfer.endings import TOKENS, check_aborted
from tests.cache_transfer.far_end import line_of, read_line
from tests.cache_transfer.pages import WAIT_S, NumpySource
from tests.cache_transfer.support import make_contract, make_pair, random_cache

pytestmark = pytest.mark.usefixtures("no_shared_memory_is_left")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_file_is_left() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    assert set(Path("/dev/shm").iterdir()) <= before


def mapped() -> bool:
    """Whether this process has memory of a handoff in its address space."""
    return "pdserve-handoff" in Path("/proc/self/maps").read_text()


@contextmanager
def far_end(role: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.cache_transfer.far_end", role]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(WAIT_S) == -signal.SIGKILL


async def test_a_sender_is_killed_while_its_memory_is_read() -> None:
    """A thread that reads it goes on unharmed; the pages are given back only after that."""
    async with make_pair("shared") as pair:
        pair.host.gated = True
        ticket, identity = pair.issue(TOKENS)
        with far_end("send") as process:
            assert process.stdin is not None
            process.stdin.write(line_of(pair.address, ticket, identity) + "\n")
            process.stdin.flush()
            assert await asyncio.to_thread(pair.host.writing.wait, 6 * WAIT_S)
            assert mapped()
            await asyncio.to_thread(kill, process)
        assert pair.host.failed == [] and mapped()  # quarantine: a writer still runs
        sink = pair.host.sinks[ticket.handoff_id, 1]
        pair.host.gate.set()
        async with asyncio.timeout(WAIT_S):
            await pair.host.over.wait()
        assert sink.closed and not sink.written_after_close
        assert not mapped()
        await check_aborted(pair, Cancelled)


async def test_a_receiver_is_killed_while_it_reads() -> None:
    with far_end("receive") as process:
        assert process.stdout is not None
        address, ticket, identity = read_line(await asyncio.to_thread(process.stdout.readline))
        contract = make_contract()
        source = NumpySource(contract, TOKENS).fill(random_cache(contract, TOKENS))
        async with channel(address) as link:
            transport = GrpcTransport(link, address, Rings())
            sender = HandoffSender(transport, ticket, identity, contract, source, logits_only=False, deadline_s=WAIT_S)
            running = asyncio.create_task(sender.run())
            sender.computed(0, (0, TOKENS))
            assert await asyncio.to_thread(process.stdout.readline) == "writing\n"
            assert mapped()
            await asyncio.to_thread(kill, process)
            with pytest.raises(Unavailable) as caught:
                await running
            assert caught.value.reason == RECEIVER_LOST
    assert not mapped()
