"""One request from placement to its last token, over as many pairs of workers as it takes.

    PLACING --> attempt on that pair (attempt.py) --> DONE
       ^            |                       |
       +------------+                       +--> FAILED (typed error, never a finish)
       retryable failure, before the first
       token or after it: another pair

A retryable failure moves the request to an untried pair while its deadline lasts. Tokens that
came before it stay: the next attempt goes on after them, so that none is lost, repeated or
altered. Anything else is the client's to see, and so is the last failure when no pair is left. A
worker lost at the transport, or silent for too long, leaves the rotation at once. Leaving
`generate` early, as a client that disconnects does, cancels the calls to both workers.

Queue: `Backlog`, from the request's own task to its door, see there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator

from pdserve.errors import PdserveError
from pdserve.rpc.events import Finish
from pdserve.telemetry.traces import OFF, Traces
from router.attempt import Attempts, failed
from router.backlog import Backlog, Event, Moved
from router.channels import WorkerChannels
from router.failures import deadline_exceeded, draining, movable
from router.outcomes import Outcomes
from router.overload import Overload
from router.planner import Planner
from router.pool import Pool
from router.prefixes import PrefixRecord
from router.quotas import Quotas
from router.recent import Recent
from router.record import Account
from router.request import Request, router_full
from router.settings import RouterSettings
from router.wire import settled


class Orchestrator:
    """Runs requests; belongs to one event loop. At most `max_active` are in flight."""

    def __init__(
        self,
        pool: Pool,
        channels: WorkerChannels,
        settings: RouterSettings,
        quotas: Quotas | None = None,
        rng: random.Random | None = None,
        recent: Recent | None = None,
        traces: Traces = OFF,
    ) -> None:
        self._traces = traces
        self._pool = pool
        self._channels = channels
        self._settings = settings
        self._quotas = quotas or Quotas(settings.tenants, settings.max_active)
        self._planner = Planner(pool, settings.prefix_blocks, settings.max_attempts, rng or random.Random())
        self._overload = Overload(pool, settings.max_wait_s, len(settings.tenants))
        self.outcomes = Outcomes(settings.disaggregate)
        self._recent = recent or Recent()
        self._running: set[asyncio.Task[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def prefixes(self) -> PrefixRecord:
        return self._planner.prefixes

    @property
    def active(self) -> int:
        return len(self._running)

    async def idle(self) -> None:
        """Returns once no request is in flight."""
        await self._idle.wait()

    def end(self) -> None:
        """Ends the requests in flight, and any that comes later, with Unavailable (DRAINING). Idempotent."""
        if not self._draining:  # a second cancellation would break into their cleaning up
            self._draining = True
            for task in self._running:
                task.cancel()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Accepted, token batches, the record if wanted, and a Finish; of several choices each has its Finish, and the
        last of them comes last. Or a PdserveError on the way.

        Close the generator (`aclosing`) to cancel. Raises at once Exhausted when too many are active, and
        Unavailable after `end`.
        """
        with self.outcomes.traffic.refusals.counting():
            if self._draining:
                raise draining()
            if self.active >= self._settings.max_active:
                raise router_full(self.active)
        backlog = Backlog(self._settings.backlog_tokens)
        task = asyncio.create_task(self._run(request, backlog), name=request.id)
        self._running.add(task)
        self._idle.clear()
        task.add_done_callback(self._ended)
        task.add_done_callback(backlog.ended)
        try:
            while (event := await backlog.get()) is not None:
                yield event
        finally:
            await settled(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle.set()

    async def _run(self, request: Request, backlog: Backlog) -> None:
        """A record and one log line, however the request comes out."""
        account = Account(request, outcomes=self.outcomes, traces=self._traces)
        self._recent.begin(account)
        try:
            with self._quotas.running(request) as running:
                try:
                    await self._in_time(account, backlog)
                finally:
                    running.output_tokens = account.output_tokens
        except PdserveError as error:
            account.end(error.reason, error)
            if request.want_record:
                backlog.add(account.record())
            raise
        except asyncio.CancelledError:
            account.end("CANCELLED")
            raise
        finally:
            self._recent.end(account, account.close())
            refusal = None if account.attempts else account.error
            took_s = account.ended_at - request.received
            self.outcomes.traffic.ended(request, account.outcome, refusal, account.output_tokens, took_s)

    async def _in_time(self, account: Account, backlog: Backlog) -> None:
        """Turns the end of the deadline, and of this router, into errors."""
        request = account.request
        try:
            async with asyncio.timeout(request.deadline - time.monotonic()):
                finish = await self._attempts(account, backlog)
                account.end(finish.reason)
                self._overload.streamed(account.ended_at - account.first_token_at)
                self._planner.remember(account)
                if request.want_record:
                    await backlog.put(account.record())
                await backlog.put(account.finish(finish))
        except TimeoutError as error:
            raise deadline_exceeded(request, account.output_tokens) from error
        except asyncio.CancelledError as error:
            if not self._draining:
                raise  # the client's wish
            raise draining() from error

    async def _attempts(self, account: Account, backlog: Backlog) -> Finish:
        attempts = Attempts(self._pool, self._channels, self._settings, self._planner, account, backlog)
        while True:
            contract = account.request.contract_digest
            pair = self._planner.choose(account)
            if not account.attempts:
                self._overload.admit(account.request, pair)
            if account.request.contract_digest != contract:
                await backlog.put(Moved(account.request.contract_digest))
            account.attempt(pair)
            try:
                return await attempts.run(pair)
            except PdserveError as error:
                if error is not account.last_error:  # else a prefill worker's, noted already
                    failed(self._pool, account, pair.decode, error)
                if not movable(error) or time.monotonic() >= account.request.deadline:
                    raise
