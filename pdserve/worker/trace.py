"""`Worker/Trace` on the wire: what a worker shows of one prompt, to be compared with another run of it.

The values stay bytes here; `prefill_worker.tracer` makes them, `pdserve.verify.remote` reads them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Iterator
from dataclasses import dataclass

from pdserve.errors import DataLoss
from pdserve.v1 import worker_pb2

PIECE_BYTES = 1 << 20  # of one tensor's values, per message
MAX_TENSOR_BYTES = 64 << 20
MAX_TRACE_BYTES = 1 << 30  # of all tensors
_ITEM_BYTES = {"fp32": 4, "float64": 8}


@dataclass(frozen=True)
class TracedRows:
    """One tensor as it travels: a row of `columns` little-endian values for each norm."""

    layer: int  # the number of layers: the logits
    tensor: str
    shape: tuple[int, ...]  # of one whole row
    columns: int
    dtype: str  # fp32 | float64
    norms: tuple[float, ...]  # of each whole row
    data: bytes


@dataclass(frozen=True)
class TracedRun:
    """A traced prompt."""

    positions: tuple[int, ...]
    cached: tuple[int, ...]  # per layer
    broken: tuple[tuple[str, str], ...]  # checks that did not hold, and what they say
    rows: tuple[TracedRows, ...]


def trace_parts(run: TracedRun) -> Iterator[worker_pb2.TracePart]:
    """A run as messages, each of bounded size."""
    faults = [worker_pb2.TraceFault(check=check, message=message) for check, message in run.broken]
    yield worker_pb2.TracePart(start=worker_pb2.TraceStart(positions=run.positions, cached=run.cached, faults=faults))
    for rows in run.rows:
        yield worker_pb2.TracePart(
            rows=worker_pb2.TraceRows(
                layer=rows.layer,
                tensor=rows.tensor,
                shape=rows.shape,
                columns=rows.columns,
                dtype=rows.dtype,
                norms=rows.norms,
            )
        )
        for start in range(0, len(rows.data), PIECE_BYTES):
            yield worker_pb2.TracePart(data=rows.data[start : start + PIECE_BYTES])


async def read_trace(parts: AsyncIterable[worker_pb2.TracePart]) -> TracedRun:
    """The inverse. Raises DataLoss for parts out of order, of another size, or too large alone or together."""
    total = 0
    start: worker_pb2.TraceStart | None = None
    rows: list[TracedRows] = []
    head: worker_pb2.TraceRows | None = None
    data = bytearray()
    async for part in parts:
        kind = part.WhichOneof("part")
        if kind == "data" and head is not None:
            data += part.data
            if len(data) > _bytes(head):
                raise _lost(f"{head.tensor} of layer {head.layer} is larger than announced")
            continue
        if head is not None:
            rows.append(_rows(head, data))
            head = None
        if kind == "start" and start is None:
            start = part.start
        elif kind == "rows" and start is not None:
            head, data = part.rows, bytearray()
            total += _bytes(head)
            if total > MAX_TRACE_BYTES:
                raise _lost("the trace has no end")
        else:
            raise _lost(f"an unexpected part: {kind}")
    if head is not None:
        rows.append(_rows(head, data))
    if start is None:
        raise _lost("the stream is empty")
    broken = tuple((fault.check, fault.message) for fault in start.faults)
    return TracedRun(tuple(start.positions), tuple(start.cached), broken, tuple(rows))


def _rows(head: worker_pb2.TraceRows, data: bytearray) -> TracedRows:
    if len(data) != _bytes(head):
        raise _lost(f"{head.tensor} of layer {head.layer} is cut short")
    return TracedRows(
        head.layer, head.tensor, tuple(head.shape), head.columns, head.dtype, tuple(head.norms), bytes(data)
    )


def _bytes(head: worker_pb2.TraceRows) -> int:
    """What the announcement amounts to. Raises DataLoss for what no worker would send."""
    size = len(head.norms) * head.columns * _ITEM_BYTES.get(head.dtype, 0)
    if not 0 < size <= MAX_TENSOR_BYTES or not head.columns <= math.prod(head.shape):
        raise _lost(f"{head.tensor} of layer {head.layer} has an impossible size")
    return size


def _lost(message: str) -> DataLoss:
    return DataLoss(message, reason="TRACE_BROKEN", field="trace", remedy="check that both ends run one version")
