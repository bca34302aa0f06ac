"""A request brought to a state and kept there."""

from __future__ import annotations

import asyncio

from decode_worker.sequence import State
from tests.decode_worker.rig import Call, Rig


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
