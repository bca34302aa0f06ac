"""Who may see operators' pages: /ui with its data, /metrics, and why /readyz says no. They tell of all tenants, though
never a text.

    no `router.tenants`   whoever reaches the port, as with adapters
    with tenants          a key of a tenant in `router.operators`
    either                a verified client certificate of role operator (or router); one of another role is not enough

Whoever else asks gets the error that the rest of the HTTP API would give, before any data is looked at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import PermissionDenied, Unauthenticated
from router.auth import HEADER, Authenticator, check_operator, shows_operator
from router.http_protocol import CERTIFICATE_NAMES
from router.settings import RouterSettings

Handler = Callable[[Request], Awaitable[Response]]


class OperatorDoor:
    """Asks who is there before a page is made."""

    def __init__(self, settings: RouterSettings, authenticator: Authenticator) -> None:
        self._settings = settings
        self._authenticator = authenticator

    def check(self, http: Request) -> None:
        """Raises Unauthenticated (401) without a good key, PermissionDenied (403) for somebody who is no operator."""
        names: frozenset[str] = http.scope.get(CERTIFICATE_NAMES, frozenset())
        if not shows_operator(self._settings, names):
            tenant = self._authenticator.tenant(http.headers.getlist(HEADER))
            check_operator(self._settings, tenant, "see this router's pages", names)

    def opens(self, http: Request) -> bool:
        """Whether `check` would let this caller in."""
        try:
            self.check(http)
        except (Unauthenticated, PermissionDenied):
            return False
        return True

    def only(self, serve: Handler, *, everyone: bool = False) -> Handler:
        """The handler behind this door. `everyone`: an operator has opened this page to whoever reaches the port."""
        if everyone:
            return serve

        async def guarded(http: Request) -> Response:
            self.check(http)
            return await serve(http)

        return guarded
