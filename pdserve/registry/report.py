"""Heartbeats of one worker on one stream, which costs a router a fraction of what unary calls do.

    closed --send--> open --error, late answer, close()--> closed

The first heartbeat of a stream is answered, and then those that come with another state, or `ANSWERED_S` after the last
answer. In between a lost registry is noticed when the connection breaks, a forgotten worker with its next heartbeat.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from pdserve.errors import Unavailable
from pdserve.rpc.writing import write
from pdserve.v1 import registry_pb2 as pb

ANSWERED_S = 4.0


class Report:
    """Belongs to one event loop. Opens on the first `send`, and again with the next one after it has failed."""

    def __init__(self) -> None:
        self._call: Any = None
        self._state = ""  # that was answered last
        self._answered_at = 0.0
        self._one_at_a_time = asyncio.Lock()

    async def send(self, stub: Any, request: pb.HeartbeatRequest, timeout_s: float) -> None:
        """Returns once it is on its way, or was answered. Raises grpc.RpcError, Unavailable, TimeoutError.

        Mutates `request`.
        """
        async with self._one_at_a_time, asyncio.timeout(timeout_s):
            if self._call is None or self._call.done():
                self._call, self._state = stub.Report(), ""
            now = asyncio.get_running_loop().time()
            request.answer = request.state != self._state or now >= self._answered_at + ANSWERED_S
            sent = False
            try:
                if not await write(self._call, request.SerializeToString()) or request.answer:
                    await self._read_answer()
                    self._state, self._answered_at = request.state, now
                sent = True
            finally:
                if not sent:
                    self.close()

    def close(self) -> None:
        """Idempotent."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def _read_answer(self) -> None:
        if await self._call.read() is grpc.aio.EOF:
            raise Unavailable(
                "the registry ended the stream of heartbeats",
                reason="REGISTRY_UNAVAILABLE",
                remedy="the next heartbeat tries again; if it stays so, see the registry's log",
            )
