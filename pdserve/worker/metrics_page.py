"""A worker's metrics page: where it listens, who may see it, and where others are told to find it.

The page tells no prompt, no output and no secret. It follows the rules of the worker's other listeners: beyond this
machine only with certificates or rpc.allow_plaintext; with certificates callers show that of an operator or a router.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client.registry import Collector

from pdserve.rpc.settings import check_plaintext, is_loopback, join_address, split_address
from pdserve.rpc.tls import OPERATOR, ROUTER, check_names, http_context
from pdserve.telemetry.exporter import PATH, MetricsListener, MetricsPage
from pdserve.worker.settings import CommonSettings

log = logging.getLogger(__name__)

ANY = ("0.0.0.0", "::")
NO_PAGE = -1  # as `metrics_port`


class WorkerMetrics:
    """Started and stopped with its worker.

    Args:
        collector: what the page shows.
    """

    def __init__(self, settings: CommonSettings, collector: Collector) -> None:
        self._settings = settings
        self._page = MetricsPage(collector)
        self._listener: MetricsListener | None = None
        self._port = 0

    async def start(self) -> None:
        """Raises ConfigError: a port in use, a host that is not allowed."""
        settings = self._settings
        if settings.metrics_port == NO_PAGE:
            return
        host, tls = interface(settings), settings.rpc.tls
        check_plaintext(host, settings.rpc)

        def check(names: frozenset[str]) -> None:
            check_names(names, (OPERATOR, ROUTER), tls.deployment, PATH)

        secured = http_context(tls, client_certificates=True) if tls.enabled else None
        allowed: Callable[[frozenset[str]], None] = check if tls.enabled else lambda names: None
        self._listener = MetricsListener(self._page, host, settings.metrics_port, secured, allowed)
        self._port = await self._listener.start()
        scheme = "https" if tls.enabled else "http"
        log.info("metrics: %s://%s%s", scheme, join_address(host, self._port), PATH)

    async def stop(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            await self._listener.stop()

    def address(self, worker: str) -> str:
        """host:port that others find the page at; empty: there is none, or none for whoever is on another machine.

        Args:
            worker: host:port that they reach the worker by.
        """
        if self._listener is None:
            return ""
        host, reached = interface(self._settings), split_address(worker)[0]
        if host in ANY:
            host = reached
        return join_address(host, self._port) if not is_loopback(host) or is_loopback(reached) else ""


def interface(settings: CommonSettings) -> str:
    return settings.metrics_host or settings.host
