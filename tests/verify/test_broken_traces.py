"""What a worker shows of a prompt, read by a side that trusts nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.errors import DataLoss
from pdserve.v1 import worker_pb2
from pdserve.worker import trace as wire
from pdserve.worker.trace import read_trace
from tests.verify.test_workers import WAIT_S

START = worker_pb2.TracePart(start=worker_pb2.TraceStart(positions=[0], cached=[1]))


def rows(**changes: Any) -> worker_pb2.TracePart:
    given = {"layer": 0, "tensor": "x", "shape": [2], "columns": 2, "dtype": "fp32", "norms": [1.0]}
    return worker_pb2.TracePart(rows=worker_pb2.TraceRows(**{**given, **changes}))


ROWS = rows()


def data(count: int) -> worker_pb2.TracePart:
    return worker_pb2.TracePart(data=b"\0" * count)


async def test_a_trace_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_TRACE_BYTES", 1 << 10)

    async def endless() -> AsyncIterator[worker_pb2.TracePart]:
        yield START
        while True:
            yield ROWS
            yield data(8)

    with pytest.raises(DataLoss) as error:
        async with asyncio.timeout(WAIT_S):
            await read_trace(endless())
    assert "no end" in error.value.message


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [ROWS, data(8)],
        [START, START],
        [START, data(8)],
        [START, ROWS],
        [START, ROWS, data(7)],
        [START, ROWS, data(8), data(1)],
        [START, rows(dtype="int8"), data(2)],
        [START, rows(columns=3), data(12)],
        [START, rows(columns=1 << 30, shape=[1 << 30], norms=[1.0] * 40)],
        [START, rows(norms=[])],
        [START, worker_pb2.TracePart()],
    ],
)
async def test_a_broken_trace_is_refused(parts: list[worker_pb2.TracePart]) -> None:
    async def sent() -> AsyncIterator[worker_pb2.TracePart]:
        for part in parts:
            yield part

    with pytest.raises(DataLoss) as error:
        await read_trace(sent())
    assert error.value.reason == "TRACE_BROKEN"
