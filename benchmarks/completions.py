"""One streamed completion over HTTP, timed where its bytes arrive: the load generator's client.

It speaks OpenAI's `/v1/completions` with token ids as prompt, `ignore_eos`, and `return_token_ids`, which
vLLM and this router both have: so tokens are counted, not guessed from text. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LINE_BYTES = 1 << 20
TIMEOUT_S = 300.0


class StreamError(Exception):
    """The server refused, reported an error within the stream, or ended it early."""


class Refused(StreamError):
    """The server answered with another status than 200."""

    def __init__(self, status: int, retry_after_s: float, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True)
class Ask:
    """One request: `kind` names its class in the workload."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int

    def body(self, model: str, **more: object) -> dict[str, object]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **more,
        }


@dataclass
class Outcome:
    """What became of a request. Times are seconds on the monotonic clock."""

    ask: Ask
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When an event with tokens came, and how many it had."""
    error: str = ""
    """Why it failed; tokens that came before stay in `arrivals`."""
    status: int = 0
    """Of the answer to a request that was refused before its first token; 0: it was not."""
    retry_after_s: float = 0.0
    """When such an answer says to come again; 0: it does not say."""
    record: dict[str, Any] = field(default_factory=dict)
    """The last attempt in pdserve's own account, where that was asked for."""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def completed(self) -> bool:
        return not self.error

    @property
    def first_token_s(self) -> float:
        """Time to first token. Needs one token."""
        return self.arrivals[0][0] - self.sent

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(when it ended, seconds) of every wait between two events. Tokens of one event have none between them."""
        times = [at for at, _ in self.arrivals]
        return [(later, later - earlier) for earlier, later in itertools.pairwise(times)]

    @property
    def mean_gap_s(self) -> float:
        """Mean time from one token to the next; 0 for a single one."""
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Target:
    """Where a system serves."""

    host: str
    port: int
    model: str
    key: str = ""
    """API key; empty: none is sent."""

    async def complete(self, ask: Ask) -> Outcome:
        """Never raises for what the server does: it is the outcome's error."""
        return await stream(self, ask)


async def stream(target: Target, ask: Ask, sent: float | None = None, **more: object) -> Outcome:
    """Runs one request to its end.

    Args:
        sent: when its time began, where something was done for it before; None: now.
        more: further fields of the body.
    """
    outcome = Outcome(ask, time.monotonic() if sent is None else sent)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for data in events(target, ask.body(target.model, **more)):
                _take(outcome, data)
            if outcome.tokens != ask.max_tokens:
                raise StreamError(f"{outcome.tokens} tokens came instead of {ask.max_tokens}")
    except (StreamError, OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
        if isinstance(error, Refused):
            outcome.status, outcome.retry_after_s = error.status, error.retry_after_s
    return outcome


def _take(outcome: Outcome, data: bytes) -> None:
    arrived = time.monotonic()
    event = json.loads(data)
    if "error" in event:
        raise StreamError(json.dumps(event["error"]))
    if history := event.get("pdserve_record", {}).get("history"):
        outcome.record = history[-1]
    for choice in event["choices"]:
        ids = choice.get("token_ids")
        if ids:
            outcome.arrivals.append((arrived, len(ids)))


async def events(target: Target, body: dict[str, object]) -> AsyncIterator[bytes]:
    """The data of each event up to [DONE]. Raises StreamError when the answer is not such a stream, or ends before."""
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=LINE_BYTES)
    try:
        await _send(target, writer, body)
        status, headers = await _head(reader)
        if status != 200:
            text = (await _whole(reader, headers))[:300].decode(errors="replace")
            raise Refused(status, float(headers.get("retry-after", 0)), text)
        if headers.get("transfer-encoding") != "chunked":
            raise StreamError("the answer is not chunked")
        pending = b""
        async for chunk in _chunks(reader):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield data
        raise StreamError("the stream ended before [DONE]")
    finally:
        writer.close()


async def post(target: Target, body: dict[str, object]) -> Any:
    """The JSON of an answer that is no stream. Raises StreamError."""
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=LINE_BYTES)
    try:
        await _send(target, writer, body)
        status, headers = await _head(reader)
        content = await _whole(reader, headers)
    finally:
        writer.close()
    if status != 200:
        raise StreamError(f"HTTP {status}: {content[:300].decode(errors='replace')}")
    return json.loads(content)


async def _send(target: Target, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
    content = json.dumps(body).encode()
    key = f"Authorization: Bearer {target.key}\r\n" if target.key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nConnection: close\r\n"
        f"{key}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return int(first.split()[1]), {name.strip().lower(): value.strip().lower() for name, value in pairs}


async def _whole(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        return b"".join([chunk async for chunk in _chunks(reader)])
    return await reader.readexactly(int(headers.get("content-length", 0)))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Raises IncompleteReadError, an EOFError, when the connection ends within the answer."""
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        content = await reader.readexactly(size + 2)
        if not size:
            return
        yield content[:-2]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed. Needs one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
