"""Calls that are given up, so that nothing of them stays.

gRPC for Python frees what an operation holds when whoever awaits it sees it end: a task that is cancelled in the middle
leaves it for good (grpc/grpc#43360, open in 1.85), 1.2 kB of a unary call, 0.1 kB of a read. So the call is cancelled
below its tasks. Their operations then end by themselves, in a moment and without the peer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

END_S = 1.0  # for a moment; then the tasks are cancelled, and what they hold stays


async def give_up(call: grpc.aio.Call, task: asyncio.Task[Any]) -> None:
    """Cancels a call and waits until the task that reads from it is over; its outcome is of no use any more."""
    below: Any = call
    if not call.done():
        below._cython_call.cancel("given up")  # call.cancel() would cancel a unary call's own task
    await asyncio.wait({task}, timeout=END_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def answer(call: grpc.aio.UnaryUnaryCall[Any, Any]) -> Any:
    """What `await call` returns or raises. Cancelling this gives the call up."""
    task = asyncio.create_task(_awaited(call), name="unary-call")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await give_up(call, task)
        raise


async def _awaited(call: grpc.aio.UnaryUnaryCall[Any, Any]) -> Any:
    return await call
