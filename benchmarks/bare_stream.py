"""What plain Python gRPC moves: a client stream of frames that are counted and thrown away.

Two processes of its own, with this project's channel settings and nothing else of it. Each
message is made by joining a short header and the payload, as any sender must; no digest, and
no copy into pages. It is the peer that transfers are compared with.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import grpc

from pdserve.rpc.channel import channel
from pdserve.rpc.server import Server

SERVICE = "pdserve.benchmark.Bare"
_HEADER = bytes(64)


class BareStream:
    """Starts both processes; `measure` as often as wanted; ends them on exit."""

    def __enter__(self) -> BareStream:
        context = multiprocessing.get_context("spawn")
        self._server, server_end = context.Pipe()
        self._client, client_end = context.Pipe()
        self._processes = [context.Process(target=_serve, args=(server_end,))]
        self._processes[0].start()
        self._processes.append(context.Process(target=_send, args=(self._server.recv(), client_end)))
        self._processes[1].start()
        server_end.close()
        client_end.close()
        return self

    def measure(self, frame_bytes: int, frames: int) -> float:
        """Bytes per second of one stream."""
        self._client.send((frame_bytes, frames))
        rate: float = self._client.recv()
        return rate

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._processes[1].join()
        self._server.close()
        self._processes[0].join()


async def count(messages: AsyncIterator[bytes], context: Any) -> bytes:
    total = 0
    async for message in messages:
        total += len(message)
    return str(total).encode()


def register(service: object, server: Any) -> None:
    handlers: dict[str, Any] = {"Count": grpc.stream_unary_rpc_method_handler(count)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def stream(link: grpc.aio.Channel, frame_bytes: int, frames: int) -> float:
    """One stream over `link`, which leads to a server with `register`. Bytes per second."""
    payload = memoryview(bytearray(frame_bytes))

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(frames):
            yield b"".join((_HEADER, payload))

    call: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = link.stream_unary(f"/{SERVICE}/Count")
    started = time.perf_counter()
    counted = int(await call(messages()))
    elapsed = time.perf_counter() - started
    if counted != frames * (frame_bytes + len(_HEADER)):
        raise SystemExit(f"the bare stream counted {counted} bytes")
    return frames * frame_bytes / elapsed


def _serve(pipe: Connection) -> None:
    asyncio.run(_serving(pipe))


async def _serving(pipe: Connection) -> None:
    server = Server()
    server.add(register, None)
    pipe.send(await server.start())
    await asyncio.to_thread(pipe.poll, None)  # until the other end is closed
    await server.stop()


def _send(address: str, pipe: Connection) -> None:
    asyncio.run(_sending(address, pipe))


async def _sending(address: str, pipe: Connection) -> None:
    link = channel(address)
    try:
        while True:
            frame_bytes, frames = await asyncio.to_thread(pipe.recv)
            pipe.send(await stream(link, frame_bytes, frames))
    except EOFError:
        await link.close()
