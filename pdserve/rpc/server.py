"""A grpc.aio server with this project's settings, health, reflection and error mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.errors import ConfigError
from pdserve.rpc.served import ErrorInterceptor
from pdserve.rpc.settings import Options, RpcSettings, check_plaintext, join_address, server_options
from pdserve.rpc.tls import server_credentials

Register = Callable[[Any, Any], None]  # such as gateway_pb2_grpc.add_GatewayServicer_to_server


class Server:
    """One listener. States: built -> start() -> serving -> stop() -> stopped.

    Belongs to the event loop that calls `start`. Services are added before.
    """

    def __init__(
        self,
        settings: RpcSettings | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        extra_options: Options = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """Port 0: any free one. The errors that interceptors' handlers raise become statuses, too.

        With TLS in the settings callers need a certificate, for a role that may call the service (tls.py).

        Raises ConfigError when `host` is not loopback, and there is no TLS and plaintext is not allowed.
        """
        self.settings = settings or RpcSettings()
        check_plaintext(host, self.settings)
        self._host = host
        self._port = port
        self._options = server_options(self.settings, extra_options)
        deployment = self.settings.tls.deployment if self.settings.tls.enabled else ""
        self._interceptors = (ErrorInterceptor(self.settings.call_timeout_s, deployment), *interceptors)
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._registered: list[tuple[str, Any]] = []
        self._grpc: grpc.aio.Server | None = None
        self._health: Any = None
        self.address = ""

    def add(self, register: Register, servicer: object) -> None:
        """Serves `servicer`; `register` is the generated add_XServicer_to_server, or one of the same shape."""
        register(servicer, self)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Called by generated code: add_XServicer_to_server(servicer, server) takes this class as its server."""
        self._check_not_started()
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Called by generated code, with the methods of one service by name."""
        self._check_not_started()
        self._registered.append((service, handlers))

    async def start(self, *, serving: bool = True) -> str:
        """Binds and serves. Returns "host:port" with the real port.

        Args:
            serving: what the health service says at first.

        Raises:
            ConfigError: the address cannot be bound, certificates cannot be used, or start() was called before.
        """
        self._check_not_started()
        server = self._grpc = grpc.aio.server(
            interceptors=self._interceptors,
            options=self._options,
            maximum_concurrent_rpcs=self.settings.max_concurrent_calls,
        )
        server.add_generic_rpc_handlers(self._handlers)
        for service, handlers in self._registered:
            server.add_registered_method_handlers(service, handlers)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*self._names(), health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            port = self._bind(server)
        except ConfigError:
            await server.stop(None)
            raise
        await self.set_serving(serving)
        await server.start()
        self.address = join_address(self._host, port)
        return self.address

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """What the health service answers for one service; None: for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse
        for name in (health.OVERALL_HEALTH, *self._names()) if service is None else (service,):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no new calls, lets running ones finish for `grace_s` seconds, cancels the rest. Idempotent."""
        if self._grpc is None:
            return
        await self._health.enter_graceful_shutdown()
        await self._grpc.stop(grace_s or None)

    async def wait(self) -> None:
        """Returns once the server was stopped."""
        if self._grpc is not None:
            await self._grpc.wait_for_termination()

    def _names(self) -> list[str]:
        return [handler.service_name() for handler in self._handlers if isinstance(handler, grpc.ServiceRpcHandler)]

    def _check_not_started(self) -> None:
        if self._grpc is not None:
            raise ConfigError("the server was started before", reason="SERVER_STARTED", remedy="add services first")

    def _bind(self, server: grpc.aio.Server) -> int:
        address, tls = join_address(self._host, self._port), self.settings.tls
        try:
            if tls.enabled:
                port = server.add_secure_port(address, server_credentials(tls))
            else:
                port = server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"cannot listen on {address}: the port is in use, or the address is not this machine's",
                reason="CANNOT_BIND",
                field="port",
                remedy="stop the other process, or choose another port (0 takes any free one)",
            )
        return port
