"""Keeps one worker's record alive.

new --start()--> listed --renew fails: Unavailable--> unheard (warned once) --renew works--> listed
                 listed --renew fails: NotFound-----> registers again
any --stop()--> deregistered
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdserve.errors import DeadlineExceeded, NotFound, PdserveError, Unavailable
from pdserve.registry.records import NamedAdapter, Registry, WorkerRecord
from pdserve.registry.settings import RegistrySettings

log = logging.getLogger(__name__)


class Heartbeat:
    """One task on the worker's event loop. Serving never depends on it."""

    def __init__(
        self,
        registry: Registry,
        record_factory: Callable[[], WorkerRecord],
        settings: RegistrySettings | None = None,
        *,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            registry: stays the caller's; `stop` does not close it.
            record_factory: the worker's record now; its state and load travel with every beat.
            settings: `heartbeat_s` and `timeout_s`.
            on_warning: told once when the registry cannot be used any more, and "" when it can again.
        """
        self._registry = registry
        self._record_factory = record_factory
        self._settings = settings or RegistrySettings()
        self._on_warning = on_warning
        self._record: WorkerRecord | None = None  # as first registered; its identity never changes
        self._adapters: tuple[NamedAdapter, ...] = ()  # as last registered
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._one_at_a_time = asyncio.Lock()
        self.warning = ""  # why the last renewal failed; empty while all is well

    async def start(self) -> None:
        """Registers once, then renews in the background. Raises what the first registration raises."""
        self._record = self._record_factory()
        await self._registry.register(self._record)
        self._adapters = self._record.adapters
        self._task = asyncio.create_task(self._run(), name="registry heartbeat")

    async def renew(self) -> None:
        """One renewal now, such as after a change of state; none once stopped. Raises nothing: trouble is a warning."""
        async with self._one_at_a_time:
            if self._stopping:
                return
            try:
                await self._beat()
            except PdserveError as error:
                self._warn(str(error))
            except Exception as error:
                # A fault in the record itself; the next one may be good.
                log.exception("a heartbeat failed")
                self._warn(f"heartbeat failed: {type(error).__name__}")
            else:
                self._warn("")

    async def stop(self) -> None:
        """Ends the renewals and deregisters, within about twice `timeout_s`. Raises nothing. Idempotent."""
        if self._task is None or self._record is None:
            return
        task, self._task = self._task, None
        self._stopping = True
        self._wake.set()
        # A renewal under way is let finish: cancelled, it could still land after the deregistration.
        await asyncio.wait({task}, timeout=self._settings.timeout_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._deregister(self._record)
        except (PdserveError, TimeoutError) as error:
            # A registry that is out of reach has often been told to stop, too.
            level = (
                logging.INFO if isinstance(error, (Unavailable, DeadlineExceeded, TimeoutError)) else logging.WARNING
            )
            log.log(level, "could not deregister %s, its lease will end: %s", self._record.worker_id, error)

    async def _deregister(self, record: WorkerRecord) -> None:
        async with self._one_at_a_time:
            await self._registry.deregister(record.worker_id, record.incarnation)

    async def _run(self) -> None:
        while not self._stopping:
            try:
                async with asyncio.timeout(self._settings.heartbeat_s):
                    await self._wake.wait()
            except TimeoutError:
                await self.renew()

    async def _beat(self) -> None:
        record = self._record_factory()
        if record.adapters != self._adapters:  # the one thing that changes and no heartbeat carries
            await self._register(record)
            return
        try:
            await self._registry.heartbeat(record.worker_id, record.incarnation, record.state, record.load)
        except NotFound:
            log.info("%s was forgotten by the registry and registers again", record.worker_id)
            await self._register(record)

    async def _register(self, record: WorkerRecord) -> None:
        await self._registry.register(record, again=True)
        self._adapters = record.adapters

    def _warn(self, text: str) -> None:
        was, self.warning = self.warning, text
        if bool(was) == bool(text):
            return
        if text:
            log.warning("the registry cannot be used, serving goes on: %s", text)
        else:
            log.info("the registry can be used again")
        if self._on_warning is not None:
            self._on_warning(text)
