"""Requests brought to a state and kept there; an engine that is held."""

from __future__ import annotations

import asyncio
import threading

from decode_worker.sequence import State
from tests.decode_worker.rig import WAIT_S, Call, Rig


async def bring_to(state: State, r: Rig, call: Call) -> asyncio.Task[object] | None:
    """Drives a request to a state and keeps it there; returns the sender's task if one runs."""
    admitted = await call.admitted()
    if state is State.WAITING:
        return None
    layers = {State.GRANTED: 0, State.RECEIVING: 1}.get(state, 3)
    sender = r.sender(admitted, r.prefill.compute(call.ids), layers=layers)
    task: asyncio.Task[object] = asyncio.create_task(sender.run())
    await r.states.wait(state)
    return task


class Gate:
    """Holds the engine's thread until opened."""

    def __init__(self, r: Rig) -> None:
        self._open = threading.Event()
        self._closed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(self._closed.set)
            assert self._open.wait(WAIT_S)

        self._task = asyncio.create_task(r.worker._thread.run(hold))

    async def closed(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._closed.wait()

    async def open(self) -> None:
        self._open.set()
        await self._task
