"""Who is asking: from a request's credentials to its tenant, before anything else is done for it.

The tenant comes from the API key alone. Nothing in a body, and no other header or metadata, is
ever looked at for it. The Registry that shares the gateway's listener, health and reflection
stay open: workers and probes have no keys.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import grpc

from pdserve.errors import PermissionDenied, Unauthenticated, shown
from pdserve.rpc.tls import MAY_CALL, OPERATOR
from pdserve.telemetry.counting import Refusals
from router.settings import RouterSettings
from router.tenants import digest_of, known_keys

HEADER = "authorization"
MISSING_KEY = "MISSING_API_KEY"
UNKNOWN_KEY = "INVALID_API_KEY"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Authenticator:
    """Knows the keys, as digests. Raises ConfigError for keys that cannot be read, or that two tenants share."""

    def __init__(self, settings: RouterSettings, environment: Mapping[str, str] = os.environ) -> None:
        self.refusals = Refusals()
        """Callers who were told no at the doors, for whatever reason."""
        self._everyone = settings.tenant
        self._open = not settings.tenants
        self._known = known_keys(settings.tenants, environment)

    def tenant(self, credentials: Sequence[str]) -> str:
        """The tenant of a caller; the one tenant there is when no keys are configured.

        Args:
            credentials: every value of the caller's `authorization` header.

        Raises Unauthenticated without a key, with one that is not known, or with several.
        """
        if self._open:
            return self._everyone
        if not credentials:
            raise _refused("there is no API key", MISSING_KEY)
        scheme, _, key = credentials[0].strip().partition(" ")
        if len(credentials) > 1 or scheme.lower() != "bearer" or not key.strip():
            raise _refused("the credentials are not one bearer token", MISSING_KEY)
        given = digest_of(key.strip())
        found = [name for digest, name in self._known.items() if hmac.compare_digest(digest, given)]
        if not found:
            raise _refused("the API key is not known here", UNKNOWN_KEY)
        return found[0]


def shows_operator(settings: RouterSettings, names: Collection[str]) -> bool:
    """Whether a certificate with these DNS names is of a role that may call the Operator service."""
    roles = MAY_CALL["pdserve.v1.Operator"]
    return not {f"{role}.{settings.rpc.tls.deployment}" for role in roles}.isdisjoint(names)


def is_operator(settings: RouterSettings, tenant: str, names: Collection[str] = ()) -> bool:
    """By its tenant's key, or by its certificate. Without tenants everyone is one, but for whoever shows a certificate
    of another role.
    """
    if shows_operator(settings, names):
        return True
    return tenant in settings.operators if settings.tenants else not names


def check_operator(settings: RouterSettings, tenant: str, what: str, names: Collection[str] = ()) -> None:
    """Raises PermissionDenied for somebody who may not do `what`."""
    if is_operator(settings, tenant, names):
        return
    if not settings.tenants:
        wanted = f"{OPERATOR}.{settings.rpc.tls.deployment}"
        raise PermissionDenied(
            "the certificate is not an operator's",
            reason="ROLE",
            field="certificate",
            remedy=f"use a certificate for {wanted}",
        )
    raise PermissionDenied(
        f"tenant {shown(tenant)} may not {what}",
        reason="NOT_OPERATOR",
        field="router.operators",
        remedy="use a key of a tenant that router.operators names",
    )


def check_grpc_operator(settings: RouterSettings, authenticator: Authenticator, what: str, context: Any) -> None:
    """As `check_operator`, for the caller of a gRPC method. An operator's certificate does beside any key."""
    tenant = authenticator.tenant(credentials(context.invocation_metadata()))
    check_operator(settings, tenant, what, certificate_names(context))


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Refuses calls of one service that bring no good key, before their message is even parsed."""

    def __init__(self, authenticator: Authenticator, service: str) -> None:
        self._authenticator = authenticator
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        try:
            self._authenticator.tenant(credentials(handler_call_details.invocation_metadata))
        except Unauthenticated as error:
            self._authenticator.refusals.count(error)
            return _refusing(handler, error)
        return handler


def certificate_names(context: Any) -> frozenset[str]:
    """DNS names of the certificate that a gRPC caller has shown and TLS has verified; without TLS none."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return frozenset(name.decode(errors="replace") for name in names)


def credentials(metadata: Any) -> tuple[str, ...]:
    """Every `authorization` of a gRPC call's metadata."""
    return tuple(value for key, value in metadata or () if key == HEADER and isinstance(value, str))


def _refusing(handler: Handler, error: Unauthenticated) -> Handler:
    """A handler that only says no, and waits for no message before it does."""

    async def refuse(request: Any, context: Any) -> Any:
        raise error

    answers = "stream" if handler.response_streaming else "unary"
    made: Handler = getattr(grpc, f"stream_{answers}_rpc_method_handler")(refuse)
    return made


def _refused(message: str, reason: str) -> Unauthenticated:
    return Unauthenticated(
        message, reason=reason, field=HEADER, remedy="send `Authorization: Bearer KEY` with a key of this router's"
    )
