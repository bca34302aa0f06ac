"""The live page at /ui: files without a build step, and what they show as server-sent events.

    GET /ui/                 the page; it holds no data, so whoever reaches the port may read it
    GET /ui/events           hello, then the pools and the requests that have changed; operators only
    GET /ui/requests/{id}    one request's decision record; operators only

Nothing waits for a viewer: there is no queue. Each looks again when it has taken what it was sent, and finds what is
then so. One that takes nothing for `client_stall_s` is dropped, and at most MAX_VIEWERS are let in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdserve.errors import Exhausted, NotFound, shown
from router import ui_data
from router.compatibility import matrix
from router.openai_render import dumps
from router.openai_stream import EventStreamResponse
from router.operator_pages import OperatorDoor
from router.orchestrate import Orchestrator
from router.pool import Pool
from router.recent import Recent
from router.settings import RouterSettings
from router.ui_data import Json

MAX_VIEWERS = 16
TICK_S = 0.5  # between two looks
_POOLS_S = 1.0  # workers tell of themselves about as often
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_DATA = HEADERS | {"cache-control": "no-store"}


def files() -> dict[str, bytes]:
    """The page's files, by name, as they are installed beside this module."""
    folder = resources.files("router").joinpath("ui")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}


class UiPages:
    """Belongs to one event loop. `close` ends all viewers, who would keep the HTTP door open otherwise."""

    def __init__(
        self,
        pool: Pool,
        orchestrator: Orchestrator,
        recent: Recent,
        settings: RouterSettings,
        registry: str,
        door: OperatorDoor,
    ) -> None:
        self._pool = pool
        self._orchestrator = orchestrator
        self._recent = recent
        self._settings = settings
        self._door = door
        self._about = ui_data.about(settings, registry)
        self._files = files()
        self._closing = asyncio.Event()
        self._compared: tuple[tuple[bytes, ...] | None, bytes] = (None, b"")
        self._matrix = _Kept(self._make_matrix, _POOLS_S)
        self._state = _Kept(self._make_state, _POOLS_S)
        self._running = _Kept(self._make_running, TICK_S)
        self.viewers = 0

    def routes(self) -> list[Route]:
        return [
            Route("/ui", _to_folder),
            Route("/ui/events", self._door.only(self.events)),
            Route("/ui/requests/{id}", self._door.only(self.decision)),
            Route("/ui/{name:path}", self.file),
        ]

    def close(self) -> None:
        """No viewer is left soon, and none comes. Idempotent."""
        self._closing.set()

    async def file(self, http: Request) -> Response:
        name = http.path_params["name"] or "index.html"
        content = self._files.get(name)
        if content is None:
            raise NotFound(f"the page has no file {shown(name)}", reason="UNKNOWN_URL", remedy="open /ui")
        return Response(content, headers=HEADERS, media_type=_TYPES[name.rpartition(".")[2]])

    async def decision(self, http: Request) -> Response:
        seen = self._recent.find(http.path_params["id"])
        if seen is None:
            raise NotFound(
                "the request is not among the last ones",
                reason="UNKNOWN_REQUEST",
                field="id",
                remedy="look for its id in the router's log, which has the same record",
            )
        return Response(_dumps(ui_data.decision(seen)), headers=_DATA, media_type="application/json")

    async def events(self, http: Request) -> Response:
        """Raises Exhausted (TOO_MANY_VIEWERS) beyond the bound."""
        if http.method == "HEAD":
            return Response(headers=_DATA, media_type=_Viewing.media_type)  # who wants no body is no viewer
        if self.viewers >= MAX_VIEWERS:
            raise Exhausted(
                f"{self.viewers} pages are open",
                reason="TOO_MANY_VIEWERS",
                remedy="close some of them",
                retry_after_ms=5000,
            )
        return _Viewing(self, self._settings.client_stall_s)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """What one viewer is sent: everything first, then what is new."""
        yield _event("hello", self._about | {"now_s": time.time()})
        change, sent = 0, {"matrix": b"", "state": b""}
        while not self._closing.is_set():
            change, seen = self._recent.since(change)
            ended = [ui_data.request(one) for one in seen]
            running = self._running.current()  # since the last look at the earliest, so none that was told as ended
            yield running
            if ended:
                yield _event("requests", {"requests": ended})
            for name, kept in (("matrix", self._matrix), ("state", self._state)):
                if (told := kept.current()) != sent[name]:
                    sent[name] = told
                    yield told
            await self._tick()

    async def _tick(self) -> None:
        try:
            async with asyncio.timeout(TICK_S):
                await self._closing.wait()
        except TimeoutError:
            return

    def _make_matrix(self) -> bytes:
        """Contracts are fixed for a worker's life, so the comparison holds until somebody comes or goes."""
        members = self._pool.members()
        boots = tuple(member.record.incarnation for member in members)
        if boots != self._compared[0]:
            self._compared = boots, _event("matrix", ui_data.matrix_json(matrix(self._pool.gate, members)))
        return self._compared[1]

    def _make_running(self) -> bytes:
        return _event("requests", {"requests": [ui_data.request(one) for one in self._recent.running()]})

    def _make_state(self) -> bytes:
        return _event("state", ui_data.state(self._pool, self._orchestrator.active, self._orchestrator.outcomes))


class _Viewing(EventStreamResponse):
    """Counts as a viewer to its end, however that comes."""

    def __init__(self, pages: UiPages, stall_s: float) -> None:
        frames = pages.frames()
        super().__init__(frames, frames, stall_s)
        self.headers.update(_DATA)
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._pages.viewers += 1  # nothing runs between this and the check in `events`
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pages.viewers -= 1


class _Kept:
    """Made at most once in `period_s`, however many look."""

    def __init__(self, make: Callable[[], bytes], period_s: float) -> None:
        self._make = make
        self._period_s = period_s
        self._made_at = float("-inf")
        self._value = b""

    def current(self) -> bytes:
        now = time.monotonic()
        if now >= self._made_at + self._period_s:
            self._made_at, self._value = now, self._make()
        return self._value


async def _to_folder(http: Request) -> Response:
    """Relative, for a proxy that serves this router below another path."""
    return RedirectResponse("ui/", headers=HEADERS)


def _event(name: str, data: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _dumps(data))


def _dumps(data: Json) -> bytes:
    return dumps(data).encode("utf-8", "replace")
