"""The router as one object: registry, pool, gateway gRPC and OpenAI HTTP, started and stopped together.

    built --start()--> serving --drain()--> draining --stop()--> stopped

With a memory:// registry the gateway's listener also serves the Registry to the workers. Its
health service says of the whole server that it is up, and of the Gateway, like /readyz, whether
a pair of workers fits: nobody is sent here before a request can be answered.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Collection
from dataclasses import replace

from starlette.routing import Route

from pdserve.errors import PdserveError
from pdserve.registry.memory import MAX_WORKERS, MemoryRegistry
from pdserve.registry.open import describe_url, open_registry
from pdserve.registry.records import Registry
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.service import add_registry
from pdserve.rpc.server import Server
from pdserve.rpc.settings import Options
from pdserve.rpc.tls import http_context
from pdserve.telemetry.traces import Traces
from router.adapter_service import ADAPTERS, RouterAdapterService, add_adapters
from router.auth import Authenticator, Doorkeeper
from router.canary import Canaries
from router.channels import WorkerChannels
from router.door import PART
from router.gate import Gate
from router.http_protocol import HttpLimits
from router.http_server import HttpServer
from router.intake import Intake
from router.metrics import MetricsPages
from router.openai_http import OpenAiApi
from router.operator_pages import OperatorDoor
from router.operator_service import OPERATOR_SERVICE, OperatorService, add_operator
from router.orchestrate import Orchestrator
from router.pool import Pool
from router.quotas import Quotas
from router.recent import Recent
from router.service import GATEWAY, GatewayService, add_gateway
from router.settings import RouterSettings
from router.shared_prefixes import PrefixShare
from router.shared_quotas import QuotaShare
from router.tokens import BundleCache
from router.ui_pages import UiPages

log = logging.getLogger(__name__)

# gRPC measures each connection's bandwidth with pings as data comes, hence for every heartbeat. Prompts are small
# enough for a fixed window.
_SMALL_MESSAGES: Options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 20))

FAREWELL_S = 2.0  # for the clients of requests that a drain has ended to take the error


class Router:
    """One router on the event loop that builds it.

    Args:
        settings: checked here.
        registry: used instead of the one that `settings.registry.url` names; stays the caller's to close.

    Raises ConfigError for settings that cannot work, API keys that cannot be read among them.
    """

    def __init__(self, settings: RouterSettings | None = None, registry: Registry | None = None) -> None:
        self.settings = settings = settings or RouterSettings()
        settings.check()
        self.authenticator = Authenticator(settings)
        self._draining = False
        self.hung = False  # it has no threads of its own
        self.broken = asyncio.Event()  # stays unset: the pool's task logs what it meets, warns in status and goes on
        self._owns_registry = registry is None
        self.registry = registry or open_registry(settings.registry.url, settings.registry, settings.rpc)
        self.channels = WorkerChannels(settings.rpc)
        gate = Gate(settings.allow_lossy, settings.disaggregate)
        self.pool = Pool(self.registry, gate, settings.refresh_s, on_addresses=self._on_snapshot)
        self.bundles = BundleCache(self.channels, settings.max_bundles, settings.rpc.call_timeout_s)
        self.quotas = Quotas(settings.tenants, settings.max_active)
        self.recent = Recent()
        self.traces = Traces(settings.telemetry, PART, f"{PART}-{secrets.token_hex(4)}")
        self.intake = Intake(self.pool, self.bundles, settings, self.quotas, self.recent, self.traces)
        self.orchestrator = Orchestrator(
            self.pool, self.channels, settings, self.quotas, recent=self.recent, traces=self.traces
        )
        self.canaries = Canaries(self.pool, self.channels, settings)
        self.sharing = self._share()
        self.quota_sharing = self._share_quotas()
        self.grpc = self._gateway()
        self.operators = OperatorDoor(settings, self.authenticator)
        name = describe_url(settings.registry.url)
        self.ui = UiPages(self.pool, self.orchestrator, self.recent, settings, name, self.operators)
        api = OpenAiApi(self.intake, self.orchestrator, self.pool, settings, self.authenticator, self.operators)
        limits = HttpLimits(settings.http_connections, settings.http_header_s)
        tls = _http_tls(settings)
        self.http = HttpServer(
            api.app(self._operator_pages()), settings.http_interface, settings.http_port, settings.rpc, limits, tls
        )

    @property
    def address(self) -> str:
        """host:port of the gRPC gateway (and of the embedded registry), once started."""
        return self.grpc.address

    @property
    def http_address(self) -> str:
        """host:port of the OpenAI HTTP API, once started."""
        return self.http.address

    async def start(self) -> None:
        """Takes the first snapshot, then opens both doors.

        Raises:
            Unavailable: the registry cannot be reached.
            ConfigError: a port is in use, or traces cannot be exported. Nothing is left running.
        """
        self.traces.open()
        try:
            await self.pool.start()
            self.bundles.prepare(self.pool.members())
            if self.sharing is not None:
                self.sharing.start()
            if self.quota_sharing is not None:
                await (
                    self.quota_sharing.exchange()
                )  # what was used before this router started counts from its first request
                self.quota_sharing.start()
            await self.grpc.start()
            await self._report_ready()
            await self.http.start()
        except PdserveError:
            await self.stop()
            raise
        log.info("router: gRPC on %s, HTTP on %s", self.address, self.http_address)

    async def drain(self, grace_s: float | None = None) -> None:
        """Takes no new requests and gives those in flight `grace_s` seconds, then ends them with Unavailable."""
        grace_s = self.settings.grace_s if grace_s is None else grace_s
        self._draining = True
        self.ui.close()
        if self.grpc.address:
            await self.grpc.set_serving(False)
        ending = asyncio.get_running_loop().call_later(grace_s, self.orchestrator.end)
        try:
            # The doors stay a little longer, to tell the clients. A door without calls closes at once,
            # which says nothing of requests that did not come through it.
            await asyncio.gather(
                self.http.stop(grace_s + FAREWELL_S), self.grpc.stop(grace_s + FAREWELL_S), self.orchestrator.idle()
            )
        finally:
            ending.cancel()
            self.orchestrator.end()

    async def stop(self) -> None:
        """Ends everything now. Idempotent. No task, channel or socket is left."""
        await self.drain(0.0)
        await self.orchestrator.idle()
        await self.pool.stop()
        if self.sharing is not None:
            await self.sharing.stop()
        if self.quota_sharing is not None:
            await self.quota_sharing.stop()
        await self.bundles.close()
        await self.channels.close()
        if self._owns_registry:
            await self.registry.close()
        await self.traces.close()

    async def _on_snapshot(self, addresses: Collection[str]) -> None:
        await self.channels.keep_only(addresses)
        self.bundles.prepare(self.pool.members())
        if self.grpc.address:
            await self._report_ready()

    async def _report_ready(self) -> None:
        if not self._draining:
            await self.grpc.set_serving(self.pool.can_serve, GATEWAY)

    def _share(self) -> PrefixShare | None:
        """None: no other router could be told."""
        if not isinstance(self.registry, RedisRegistry):
            return None
        return PrefixShare(self.orchestrator.prefixes, self.registry.board(), self.settings.share_s)

    def _share_quotas(self) -> QuotaShare | None:
        """None: no other router could be told, or there is nothing to tell."""
        if not isinstance(self.registry, RedisRegistry) or not self.quotas.counted:
            return None
        return QuotaShare(self.quotas, self.registry.latest(), self.settings.share_s)

    def _operator_pages(self) -> list[Route]:
        """What only operators may see."""
        return [*self.ui.routes(), *MetricsPages(self).routes()]

    def _gateway(self) -> Server:
        settings = self.settings
        name = describe_url(settings.registry.url)
        doors = [Doorkeeper(self.authenticator, service) for service in (GATEWAY, ADAPTERS, OPERATOR_SERVICE)]
        rpc = settings.rpc
        if isinstance(self.registry, MemoryRegistry):  # each worker's heartbeats are one call that lasts
            rpc = replace(rpc, max_concurrent_calls=rpc.max_concurrent_calls + MAX_WORKERS)
        server = Server(rpc, settings.host, settings.port, extra_options=_SMALL_MESSAGES, interceptors=doors)
        gateway = GatewayService(
            self.intake, self.orchestrator, self.pool, settings, name, self.authenticator, self.recent
        )
        add_gateway(server, gateway)
        adapters = RouterAdapterService(self.pool, self.channels, settings, self.authenticator, self.intake.model)
        add_adapters(server, adapters)
        operator = OperatorService(self.pool, self.canaries, self.channels, settings, self.authenticator, self.registry)
        add_operator(server, operator)
        if isinstance(self.registry, MemoryRegistry):
            add_registry(server, self.registry)
        return server


def _http_tls(settings: RouterSettings) -> ssl.SSLContext | None:
    if not settings.rpc.tls.enabled:
        return None
    return http_context(settings.http_tls, client_certificates=settings.http_client_certificates)
