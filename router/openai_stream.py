"""Events on their way to an HTTP client, and server-sent events that end with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import Cancelled, PdserveError
from pdserve.rpc.events import Finish, TokenBatch
from router.door import answer_headers
from router.merging import Numbered
from router.openai_answer import Answer

log = logging.getLogger(__name__)

T = TypeVar("T")

Piece = tuple[int, TokenBatch | Finish]


async def following(events: AsyncGenerator[Numbered, None], answer: Answer) -> Piece | None:
    """The next piece of the answer, None after the last; what comes besides is the answer's to note."""
    async for number, event in events:
        if isinstance(event, (TokenBatch, Finish)):
            return number, event
        answer.note(number, event)
    return None


async def chunks(
    answer: Answer, piece: Piece | None, events: AsyncGenerator[Numbered, None]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events from the first token on."""
    try:
        if opening := answer.opening():
            yield opening
        while piece is not None:
            if event := answer.event(*piece):
                yield event
            piece = await following(events, answer)
        yield answer.closing()
    except PdserveError as error:
        yield answer.failed(error)


class EventStreamResponse(Response):
    """Server-sent events. Ends `events` whatever happens: done, client gone, or client stuck."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], events: AsyncGenerator[Any, None], stall_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **answer_headers()})
        del self.headers["content-length"]
        self._chunks = chunks
        self._events = events
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except Cancelled as error:
            log.info("stream ended early: %s", error)
        finally:
            # Both: closing chunks that nobody has begun to read would not reach the events.
            await self._chunks.aclose()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await self._send(send, chunk, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, chunk: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
        except TimeoutError as error:
            raise Cancelled(f"the client took nothing for {self._stall_s:g} s") from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (then raises Cancelled).

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise Cancelled("the client has gone")
    finally:
        # Both at once: meanwhile the work could come to a result that nobody would take, or close.
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
