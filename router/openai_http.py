"""The OpenAI HTTP API: completions, models, and the two health questions.

An error before the first event has its own status; one that comes later is an event of its
own, after which the stream ends without [DONE]. A client that goes away, or takes nothing for
`client_stall_s`, cancels its request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.status import HTTP_405_METHOD_NOT_ALLOWED

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
from pdserve.request import check_token_ids
from router.adapters import listed_name
from router.auth import HEADER, Authenticator
from router.door import answer_headers, come_in
from router.intake import Intake
from router.merging import merged
from router.openai_answer import Answer
from router.openai_chat import ChatAnswer
from router.openai_json import parse
from router.openai_render import BODY_TOO_LARGE, Json, dumps, error_body, error_status, model, models
from router.openai_schema import DetokenizeBody, TokenizeBody, parse_chat, parse_completion
from router.openai_stream import EventStreamResponse, chunks, following, while_connected
from router.openai_text import TextAnswer, echo_of
from router.operator_pages import OperatorDoor
from router.orchestrate import Orchestrator
from router.pool import Pool
from router.request import Ask
from router.request import Request as Checked
from router.settings import RouterSettings
from router.tokens import encode, unknown_model

log = logging.getLogger(__name__)

SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize")

AnswerTo = Callable[[Sequence[Checked]], Awaitable[Answer]]


class OpenAiApi:
    """Starlette handlers over the router's parts."""

    def __init__(
        self,
        intake: Intake,
        orchestrator: Orchestrator,
        pool: Pool,
        settings: RouterSettings,
        authenticator: Authenticator,
        operators: OperatorDoor,
    ) -> None:
        self._operators = operators
        self._intake = intake
        self._orchestrator = orchestrator
        self._pool = pool
        self._settings = settings
        self._authenticator = authenticator

    def app(self, more: Iterable[Route] = ()) -> Starlette:
        """The API, and routes of others who want its shape of errors."""
        posts = {
            "/v1/chat/completions": self.chat_completions,
            "/v1/completions": self.completions,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        return Starlette(
            routes=[
                *(
                    Route(path + slash, self._known(serve), methods=["POST"])
                    for path, serve in posts.items()
                    for slash in ("", "/")
                ),
                Route("/v1/models", self._known(self.list_models)),
                Route("/v1/models/{name:path}", self._known(self.get_model)),
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
                *more,
            ],
            middleware=list(_cors(self._settings.cors_origins)),
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
            come_in(http.headers.getlist)
            with self._authenticator.refusals.counting():
                return await serve(http, self._authenticator.tenant(http.headers.getlist(HEADER)))

        return handler

    async def chat_completions(self, http: Request, tenant: str) -> Response:
        body = parse_chat(await self._read_body(http))
        ask = body.ask()

        async def answer_to(requests: Sequence[Checked]) -> Answer:
            return ChatAnswer(requests, body.wants_usage, bool(body.return_token_ids), tools=ask.tools)

        return await while_connected(http.receive, self._answer((ask,), tenant, bool(body.stream), answer_to))

    async def completions(self, http: Request, tenant: str) -> Response:
        body = parse_completion(await self._read_body(http))
        asks = body.asks()

        async def answer_to(requests: Sequence[Checked]) -> Answer:
            # Token ids become text again, which takes long for many of them.
            echoes = await asyncio.to_thread(lambda: list(map(echo_of, asks, requests))) if body.echo else ()
            return TextAnswer(requests, body.wants_usage, bool(body.return_token_ids), echoes=echoes)

        return await while_connected(http.receive, self._answer(asks, tenant, bool(body.stream), answer_to))

    async def tokenize(self, http: Request, tenant: str) -> Response:
        """The ids a prompt would have, in the form that vLLM gave this."""
        body = parse(await self._read_body(http), TokenizeBody)
        prompt = body.asked()
        tokenizer, room = await self._intake.text_of(body.model, tenant)
        ids = await encode(prompt, tokenizer, room)
        answer: Json = {"count": len(ids), "max_model_len": room.total, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        return reply(200, answer)

    async def detokenize(self, http: Request, tenant: str) -> Response:
        body = parse(await self._read_body(http), DetokenizeBody, ids="tokens")
        ids = body.ids()
        tokenizer, room = await self._intake.text_of(body.model, tenant)
        if len(ids) > room.total:
            raise InvalidRequest(
                f"there are {len(ids)}", reason="TOO_MANY_TOKENS", field="tokens", remedy=f"send at most {room.total}"
            )
        if ids:
            check_token_ids(ids, tokenizer.vocab_size, "tokens")
        text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=body.skip_special_tokens)
        return reply(200, {"prompt": text})

    async def list_models(self, http: Request, tenant: str) -> Response:
        return reply(200, models(self._intake.names(tenant)))

    async def get_model(self, http: Request, tenant: str) -> Response:
        name = http.path_params["name"]
        if not name:
            return await self.list_models(http, tenant)
        served, listed = self._intake.names(tenant), listed_name(self._pool, name)
        if listed not in served:
            raise unknown_model(name, list(served))
        return reply(200, model(listed, *served[listed]))

    async def healthz(self, http: Request) -> Response:
        return reply(200, {"status": "ok"})

    async def readyz(self, http: Request) -> Response:
        """Ready when at least one pair of workers fits; operators are told of which models, and what does not fit."""
        if not self._operators.opens(http):
            return reply(200 if self._pool.can_serve else 503, {"ready": self._pool.can_serve})
        verdicts = {name: self._pool.verdict(name) for name in self._pool.models()}
        ready = [name for name, verdict in verdicts.items() if verdict.matches]
        notes = {name: list(verdict.notes) for name, verdict in verdicts.items()}
        body = {"ready": bool(ready), "models": ready, "refused": notes, "warning": self._pool.warning}
        return reply(200 if ready else 503, body)

    async def _answer(self, asks: Sequence[Ask], tenant: str, stream: bool, answer_to: AnswerTo) -> Response:
        """A complete answer, or the beginning of a stream: a failure up to here has a status of its own."""
        requests = await self._intake.take_all(asks, tenant)
        answer = await answer_to(requests)
        events = merged([self._orchestrator.generate(request) for request in requests])
        started = False
        try:
            piece = await following(events, answer)
            if stream:
                started = True
                return EventStreamResponse(chunks(answer, piece, events), events, self._settings.client_stall_s)
            while piece is not None:
                answer.keep(*piece)
                piece = await following(events, answer)
            return reply(200, answer.whole())
        except PdserveError as error:
            return _error_reply(error, answer.extension())
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
            raise DeadlineExceeded(
                "the request's body did not come in time",
                field="body",
                remedy=f"send all of it within {self._settings.client_stall_s:g} s",
            ) from error
        return bytes(data)


def _cors(origins: Sequence[str]) -> Iterator[Middleware]:
    """Lets pages of these origins ask. Cookies play no part: whoever asks needs an API key where there are tenants."""
    if origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after"],
        )


def reply(status: int, body: Json, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(body), status, {**answer_headers(), **(headers or {})}, media_type="application/json")


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
    refused = NotFound(wrong, reason="UNKNOWN_URL", remedy=f"use one of {', '.join(SERVED)}")
    if status == HTTP_405_METHOD_NOT_ALLOWED:
        allowed = getattr(error, "headers", None) or {}
        refused = NotFound(wrong, reason="METHOD_NOT_ALLOWED", remedy=f"use {allowed.get('Allow', 'another method')}")
    return reply(status, error_body(refused), dict(getattr(error, "headers", None) or {}))


async def _on_disconnect(http: Request, error: Exception) -> Response:
    return _error_reply(Cancelled("the client has gone"))


async def _on_bug(http: Request, error: Exception) -> Response:
    """Nothing of ours leaks; the traceback goes to the log with the exception that Starlette raises on."""
    return _error_reply(Internal("the server failed", remedy="see the server's log"))
