"""The load generator's client against a server whose every byte is known: what it counts, and what is a failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks.completions import Ask, Outcome, Target, percentile
from benchmarks.workloads import Interference, Phase, Poisson, arrive, goodput, interfere, meets

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(ids: Sequence[int], **more: object) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": list(ids), "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


END = chunk(b"")


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[Target, list[dict[str, object]]]]:
    """Answers every connection with the script; keeps the bodies that came."""
    bodies: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        await script(writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1], "m"), bodies


async def run(*parts: bytes, max_tokens: int = 3) -> Outcome:
    async def script(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    async with serving(script) as (target, _):
        return await target.complete(Ask("k", (5, 6), max_tokens))


async def test_tokens_are_timed_when_they_arrive() -> None:
    written: list[float] = []
    seen: list[asyncio.Event] = [asyncio.Event(), asyncio.Event()]

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        for ids in ([1], [2, 3]):
            async with asyncio.timeout(5):
                await seen[len(written)].wait()
            written.append(time.monotonic())
            writer.write(chunk(event(ids)))
            await writer.drain()
        writer.write(chunk(DONE) + END)

    async with serving(script) as (target, bodies):
        sending = asyncio.create_task(target.complete(Ask("k", (5, 6), 3)))
        loop = asyncio.get_running_loop()
        for number, gate in enumerate(seen):
            loop.call_later(0.05 * (number + 1), gate.set)
        outcome = await sending
    assert outcome.completed, outcome.error
    assert [count for _, count in outcome.arrivals] == [1, 2] and outcome.tokens == 3
    assert all(arrived >= sent for (arrived, _), sent in zip(outcome.arrivals, written, strict=True))
    assert outcome.first_token_s == outcome.arrivals[0][0] - outcome.sent >= written[0] - outcome.sent
    ((at, gap),) = outcome.gaps
    assert (at, gap) == (outcome.arrivals[1][0], outcome.arrivals[1][0] - outcome.arrivals[0][0])
    assert outcome.mean_gap_s == pytest.approx(gap / 2)  # three tokens, two waits
    (body,) = bodies
    assert body["prompt"] == [5, 6] and body["ignore_eos"] and body["stream"] and body["max_tokens"] == 3


async def test_an_event_may_be_cut_anywhere_and_lines_may_end_as_in_http() -> None:
    content = event([1]) + event([2]).replace(b"\n", b"\r\n") + b": comment\n\n" + event([3]) + DONE
    outcome = await run(STREAM, *(chunk(content[at : at + 7]) for at in range(0, len(content), 7)), END)
    assert outcome.completed, outcome.error
    assert outcome.tokens == 3


async def test_events_without_tokens_are_no_arrivals() -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    outcome = await run(STREAM, chunk(event([])), chunk(event([1, 2, 3])), chunk(event([])), chunk(usage + DONE), END)
    assert outcome.completed and len(outcome.arrivals) == 1


@pytest.mark.parametrize(
    ("parts", "tokens", "why"),
    [
        ((STREAM, chunk(event([1])), chunk(b'data: {"error": {"message": "no pages"}}\n\n'), END), 1, "no pages"),
        ((STREAM, chunk(event([1])),), 1, "IncompleteRead"),
        ((STREAM, chunk(event([1])), END), 1, "before [DONE]"),
        ((STREAM, chunk(event([1, 2])), chunk(DONE), END), 2, "2 tokens came instead of 3"),
        ((STREAM, chunk(b"data: {not json\n\n"), END), 0, "JSONDecodeError"),
        ((b"HTTP/1.1 503 Unavailable\r\nContent-Length: 4\r\n\r\nbusy",), 0, "HTTP 503: busy"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",), 0, "not chunked"),
        ((), 0, "IncompleteRead"),
    ],
)  # fmt: skip
async def test_what_is_no_whole_answer_is_a_failure(parts: tuple[bytes, ...], tokens: int, why: str) -> None:
    outcome = await run(*parts)
    assert not outcome.completed and why in outcome.error
    assert outcome.tokens == tokens


async def test_nobody_listening_is_a_failure() -> None:
    async with serving(lambda _: asyncio.sleep(0)) as (target, _):
        pass
    outcome = await target.complete(Ask("k", (1,), 1))
    assert "Refused" in outcome.error and not outcome.arrivals


def made(sent: float, *arrivals: float, error: str = "", kind: str = "poisson") -> Outcome:
    return Outcome(Ask(kind, (1,), len(arrivals)), sent, [(at, 1) for at in arrivals], error)


def test_goodput_counts_requests_that_meet_both_objectives() -> None:
    plan = Poisson(rate=1.0, seconds=10.0, first_token_s=2.5, mean_gap_s=0.1)
    good, late, slow = made(0.0, 2.5, 2.55), made(0.0, 2.6, 2.65), made(0.0, 1.0, 1.05, 1.3)
    broken, single = made(0.0, 1.0, 1.1, error="aborted"), made(5.0, 6.0)
    outcomes = (good, late, slow, broken, single)
    assert [meets(outcome, plan) for outcome in outcomes] == [True, False, False, False, True]
    assert goodput([Phase(outcomes, 0.0, 10.0)], plan) == pytest.approx(0.2)
    assert goodput([Phase(outcomes, 0.0, 10.0), Phase((good,), 0.0, 20.0)], plan) == pytest.approx(3 / 30)


def test_a_phase_counts_what_happened_within_it() -> None:
    phase = Phase((made(0.0, 1.0, 2.0, 4.0, kind="steady"), made(2.5, 3.0, 9.0, kind="long")), 1.5, 5.0)
    assert phase.gaps("steady") == [1.0, 2.0]
    assert phase.gaps("long") == []  # its gap ended after the phase
    assert phase.first_tokens("long") == [0.5]
    assert phase.first_tokens("steady") == []  # sent before the phase
    assert phase.tokens_per_s == pytest.approx(3 / 3.5)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentiles_are_of_the_nearest_rank(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


class Instant:
    """A system that answers each request at once, with all its tokens."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []

    async def send(self, ask: Ask) -> Outcome:
        self.asks.append(ask)
        now = time.monotonic()
        await asyncio.sleep(0.01)
        return Outcome(ask, now, [(time.monotonic(), 1)] * ask.max_tokens)


async def test_poisson_arrivals_are_the_same_for_the_same_seed() -> None:
    runs = []
    for seed in (1, 1, 2):
        system, plan = Instant(), Poisson(rate=200.0, seconds=0.1, seed=seed)
        phase = await arrive(system.send, plan)
        assert len(phase.outcomes) == len(system.asks) > 0
        assert phase.end >= phase.begin + plan.seconds
        runs.append({(len(ask.prompt), ask.max_tokens, ask.prompt[0]) for ask in system.asks})
    assert runs[0] == runs[1] != runs[2]


async def test_long_prompts_come_at_their_times_among_closed_loop_streams() -> None:
    system = Instant()
    plan = Interference(0.2, 0.1, streams=2, steady=(4, 8), long=(50, 1), every_s=0.05)
    idle, busy = await interfere(system.send, plan)
    long = [outcome for outcome in busy.outcomes if outcome.ask.kind == "long"]
    assert [len(outcome.ask.prompt) for outcome in long] == [50] * 4
    assert all(outcome.sent >= busy.begin + 0.05 * number for number, outcome in enumerate(long))
    assert idle.end == busy.begin and not idle.failures
    assert len(busy.of("steady")) > 2
    assert len({ask.prompt for ask in system.asks}) == len(system.asks)  # no two share a prefix
