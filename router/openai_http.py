"""The OpenAI HTTP API: chat completions, models, and the two health questions.

An error before the first event has its own status; one that comes later is an event of its
own, after which the stream ends without [DONE]. A client that goes away, or takes nothing for
`client_stall_s`, cancels its request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.status import HTTP_405_METHOD_NOT_ALLOWED
from starlette.types import Receive, Scope, Send

from pdserve.errors import (
    MAX_SHOWN,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    PdserveError,
    Unauthenticated,
)
from pdserve.rpc.events import Accepted, Finish, HandoffRecord, TokenBatch
from router.auth import HEADER, Authenticator
from router.backlog import Event, Moved
from router.intake import Intake
from router.openai_render import (
    BODY_TOO_LARGE,
    Completion,
    Json,
    dumps,
    error_body,
    error_status,
    model,
    models,
    sse,
)
from router.openai_schema import ChatCompletionBody, parse_body
from router.orchestrate import Orchestrator
from router.pool import Pool
from router.settings import RouterSettings
from router.tokens import unknown_model

log = logging.getLogger(__name__)

T = TypeVar("T")


class OpenAiApi:
    """Starlette handlers over the router's parts."""

    def __init__(
        self,
        intake: Intake,
        orchestrator: Orchestrator,
        pool: Pool,
        settings: RouterSettings,
        authenticator: Authenticator,
    ) -> None:
        self._intake = intake
        self._orchestrator = orchestrator
        self._pool = pool
        self._settings = settings
        self._authenticator = authenticator

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._known(self.chat_completions), methods=["POST"]),
                Route("/v1/models", self._known(self.list_models)),
                Route("/v1/models/{name:path}", self._known(self.get_model)),
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
            ],
            exception_handlers={
                PdserveError: _on_error,
                HTTPException: _on_http_exception,
                ClientDisconnect: _on_disconnect,
                Exception: _on_bug,
            },
        )

    def _known(self, serve: Callable[[Request, str], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Asks who is there before anything else; gives the handler the caller's tenant."""

        async def handler(http: Request) -> Response:
            return await serve(http, self._authenticator.tenant(http.headers.getlist(HEADER)))

        return handler

    async def chat_completions(self, http: Request, tenant: str) -> Response:
        body = parse_body(await self._read_body(http))
        return await while_connected(http.receive, self._answer(body, tenant))

    async def list_models(self, http: Request, tenant: str) -> Response:
        return reply(200, models(self._pool.models()))

    async def get_model(self, http: Request, tenant: str) -> Response:
        name = http.path_params["name"]
        served = self._pool.models()
        if name not in served:
            raise unknown_model(name, list(served))
        return reply(200, model(name, served[name]))

    async def healthz(self, http: Request) -> Response:
        return reply(200, {"status": "ok"})

    async def readyz(self, http: Request) -> Response:
        """Ready when at least one pair of workers fits; otherwise each model's reasons."""
        verdicts = {name: self._pool.verdict(name) for name in self._pool.models()}
        ready = [name for name, verdict in verdicts.items() if verdict.matches]
        notes = {name: list(verdict.notes) for name, verdict in verdicts.items()}
        body = {"ready": bool(ready), "models": ready, "refused": notes, "warning": self._pool.warning}
        return reply(200 if ready else 503, body)

    async def _answer(self, body: ChatCompletionBody, tenant: str) -> Response:
        """A complete answer, or the beginning of a stream: a failure up to here has a status of its own."""
        request = await self._intake.take(body.ask(), tenant)
        completion = Completion(request, body.wants_usage)
        events = self._orchestrator.generate(request)
        started = False
        try:
            event = await _following(events, completion)
            if body.stream:
                started = True
                return EventStreamResponse(_chunks(completion, event, events), events, self._settings.client_stall_s)
            while isinstance(event, TokenBatch):
                completion.take(event)
                event = await _following(events, completion)
            return reply(200, completion.whole(event))
        except PdserveError as error:
            return _error_reply(error, completion.extension())
        finally:
            if not started:
                await events.aclose()

    async def _read_body(self, http: Request) -> bytes:
        """Raises InvalidRequest beyond the size limit, DeadlineExceeded for a body that does not come."""
        data = bytearray()
        try:
            async with asyncio.timeout(self._settings.client_stall_s):
                async for piece in http.stream():
                    data += piece
                    if len(data) > self._settings.max_body_bytes:
                        raise InvalidRequest(
                            f"the body is larger than {self._settings.max_body_bytes} bytes",
                            reason=BODY_TOO_LARGE,
                            field="body",
                            remedy="send less text",
                        )
        except TimeoutError as error:
            raise DeadlineExceeded("the request's body did not come in time", field="body") from error
        return bytes(data)


async def _chunks(
    completion: Completion, event: TokenBatch | Finish, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events from the first token on."""
    try:
        yield sse(completion.first())
        while isinstance(event, TokenBatch):
            chunk = completion.take(event)
            if event.text or event.logprobs:
                yield sse(chunk)
            event = await _following(events, completion)
        yield sse(completion.last(event))
        if completion.wants_usage:
            yield sse(completion.usage(event))
        yield sse("[DONE]")
    except PdserveError as error:
        yield sse(completion.failed(error))


async def _following(events: AsyncGenerator[Event, None], completion: Completion) -> TokenBatch | Finish:
    """The next piece of the answer; what comes besides is the completion's to know."""
    while True:
        event = await anext(events)
        if isinstance(event, Moved):
            completion.moved(event)
        elif isinstance(event, HandoffRecord):
            completion.record = event
        elif not isinstance(event, Accepted):
            return event


class EventStreamResponse(Response):
    """Server-sent events. Ends `events` whatever happens: done, client gone, or client stuck."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], events: AsyncGenerator[Event, None], stall_s: float
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
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


def reply(status: int, body: Json, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json")


def _error_reply(error: PdserveError, extension: Json | None = None) -> Response:
    headers = {}
    if wait_s := -(-error.retry_after_ms // 1000):
        headers["retry-after"] = str(wait_s)
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = 'Bearer realm="pdserve"'
    return reply(error_status(error), error_body(error) | (extension or {}), headers)


async def _on_error(http: Request, error: Exception) -> Response:
    return _error_reply(error if isinstance(error, PdserveError) else Internal("the server failed"))


async def _on_http_exception(http: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's shape too."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    wrong = f"{http.method[:MAX_SHOWN]} {http.url.path[:MAX_SHOWN]} is not served"
    refused = NotFound(wrong, reason="UNKNOWN_URL", remedy="see /v1/models and /v1/chat/completions")
    if status == HTTP_405_METHOD_NOT_ALLOWED:
        allowed = getattr(error, "headers", None) or {}
        refused = NotFound(wrong, reason="METHOD_NOT_ALLOWED", remedy=f"use {allowed.get('Allow', 'another method')}")
    return reply(status, error_body(refused), dict(getattr(error, "headers", None) or {}))


async def _on_disconnect(http: Request, error: Exception) -> Response:
    return _error_reply(Cancelled("the client has gone"))


async def _on_bug(http: Request, error: Exception) -> Response:
    """Nothing of ours leaks; the traceback goes to the log with the exception that Starlette raises on."""
    return _error_reply(Internal("the server failed", remedy="see the server's log"))
