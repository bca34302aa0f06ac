"""One request from placement to its last token, over as many pairs of workers as it takes.

    PLACING --> ADMITTING --> PREFILLING -----> STREAMING --> DONE
       ^            |           |   ^   |          ^   |
       |            |           |   |   | prefill failed: `retry` on the same decode stream
       |            |           |   |   v          |   |
       |            |           |   +- ASKING -----+   |
       |            |           |       |  the cache had come whole before
       +------------+-----------+-------+              +--> FAILED (typed error, never a finish)
        decode failed, or no prefill worker is left for it: another pair

Before the first token a retryable failure moves the request to an untried pair while its
deadline lasts; anything else, and any failure afterwards, is the client's to see. A worker
lost at the transport, or silent for `first_token_timeout_s`, leaves the rotation at once. Leaving
`generate` early, as a client that disconnects does, cancels the calls to both workers.

Queue: `Backlog`, from the request's own task to its door, see there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from cache_transfer.contract import HandoffIdentity, Ticket, check_compatible, check_identity, prompt_digest
from pdserve.errors import PdserveError
from pdserve.rpc.events import Accepted, Finish, TokenBatch
from router.backlog import Backlog, Event
from router.channels import WorkerChannels
from router.failures import FIRST_TOKEN_TIMEOUT, deadline_exceeded, draining, movable, silent, unexpected
from router.gate import Member, Pair
from router.placement import cache_tokens
from router.planner import Planner
from router.pool import Pool
from router.record import Account
from router.request import Request, router_full
from router.settings import RouterSettings
from router.wire import WORKER_LOST, Admitted, DecodeCall, DecodeEvent, PrefillReport, lost, run_prefill, settled


class Orchestrator:
    """Runs requests; belongs to one event loop. At most `max_active` are in flight."""

    def __init__(
        self, pool: Pool, channels: WorkerChannels, settings: RouterSettings, rng: random.Random | None = None
    ) -> None:
        self._pool = pool
        self._channels = channels
        self._settings = settings
        self._planner = Planner(pool, settings.prefix_blocks, settings.max_attempts, rng or random.Random())
        self._running: set[asyncio.Task[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

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
        """Accepted, token batches, the record if wanted, and a Finish; or a PdserveError on the way.

        Close the generator (`aclosing`) to cancel. Raises at once Exhausted when too many are active, and
        Unavailable after `end`.
        """
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
        """The deadline, and one log line whatever happens."""
        account = Account(request)
        outcome = "CANCELLED"
        try:
            async with asyncio.timeout(request.deadline - time.monotonic()):
                finish = await self._attempts(account, backlog)
            outcome = finish.reason
        except TimeoutError as error:
            late = deadline_exceeded(request, account.output_tokens)
            outcome = late.reason
            raise late from error
        except PdserveError as error:
            outcome = error.reason
            raise
        except asyncio.CancelledError as error:
            if not self._draining:
                raise  # the client's wish
            end = draining()
            outcome = end.reason
            raise end from error
        finally:
            account.log(outcome)

    async def _attempts(self, account: Account, backlog: Backlog) -> Finish:
        while True:
            pair = self._planner.choose(account)
            account.attempt(pair)
            try:
                return await self._on_pair(pair, account, backlog)
            except PdserveError as error:
                if error is not account.last_error:  # else a prefill worker's, noted already
                    self._failed(pair.decode, error, account)
                if account.started or not movable(error):
                    raise

    def _failed(self, member: Member, error: PdserveError, account: Account) -> None:
        """Notes whose fault an attempt's end was."""
        if error.reason in (WORKER_LOST, FIRST_TOKEN_TIMEOUT):
            self._pool.suspect(member)
        account.failed(member, error)

    async def _on_pair(self, pair: Pair, account: Account, backlog: Backlog) -> Finish:
        """One decode stream, with as many prefill workers as it takes. Raises decode's errors, and prefill's last."""
        request = account.fitted(pair)
        job = self._pool.begin(pair.decode, 0, cache_tokens(len(request.prompt_ids), request.max_tokens))
        try:
            async with DecodeCall(self._channels, pair.decode.address, left_s(request)) as call:
                admitted = await self._admission(call, pair, request)
                check_admitted(request, pair, admitted, self._settings.allow_lossy)
                if not account.accepted:
                    account.accepted = True
                    seed = request.sampling.seed or 0
                    await backlog.put(Accepted(request.id, request.model, len(request.prompt_ids), seed))
                return await self._prefill_and_stream(call, pair, admitted, account, backlog)
        finally:
            self._pool.end(job)

    async def _admission(self, call: DecodeCall, pair: Pair, request: Request) -> Admitted:
        limit_s = self._settings.admit_timeout_s
        try:
            async with asyncio.timeout(limit_s):  # connecting included
                await call.open(request, pair.prefill.record.contract)
                event = await call.next()
        except TimeoutError as error:
            raise lost(pair.decode.address, f"no answer within {limit_s:g} s") from error
        if not isinstance(event, Admitted):
            raise unexpected(event, "before admitting the request")
        return event

    async def _prefill_and_stream(
        self, call: DecodeCall, pair: Pair, admitted: Admitted, account: Account, backlog: Backlog
    ) -> Finish:
        ticket = admitted.ticket
        while True:
            async with self._prefilling(pair, admitted, ticket, account) as prefill:
                error = await self._first_word(call, pair, prefill)
                if error is None:
                    return await self._stream(await call.next(), call, prefill, account, backlog)
            self._failed(pair.prefill, error, account)
            following = self._planner.find(account, pair.decode)
            # Decode may have had the whole cache before prefill failed: only its own answer tells.
            event = await self._ask_again(call, following or pair)
            if not isinstance(event, Ticket):
                return await self._stream(event, call, None, account, backlog)
            if following is None or not movable(error):
                raise error
            pair, ticket = following, event
            account.attempt(pair)

    async def _first_word(
        self, call: DecodeCall, pair: Pair, prefill: asyncio.Task[PrefillReport]
    ) -> PdserveError | None:
        """Waits until decode has something to read (None), or until this attempt has failed at prefill (its error).

        Raises Unavailable (FIRST_TOKEN_TIMEOUT) when prefill has done its part and decode says nothing.
        """
        reading = call.reading()
        limit_s = self._settings.first_token_timeout_s
        until = time.monotonic() + limit_s
        await asyncio.wait({prefill, reading}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if prefill.done() and prefill.exception() is None:
            await asyncio.wait({reading}, timeout=max(0.0, until - time.monotonic()))
        if reading.done():
            return None
        if not prefill.done():
            return silent(pair.prefill, limit_s)
        error = prefill.exception()
        if error is None:
            raise silent(pair.decode, limit_s)
        if not isinstance(error, PdserveError):
            raise error
        return error

    async def _ask_again(self, call: DecodeCall, pair: Pair) -> DecodeEvent:
        """A ticket for the pair's prefill worker; or what follows the cache, if that had arrived whole."""
        await call.retry(pair.prefill.record.contract)
        limit_s = self._settings.first_token_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await call.next()
        except TimeoutError as error:
            raise silent(pair.decode, limit_s) from error

    @asynccontextmanager
    async def _prefilling(
        self, pair: Pair, admitted: Admitted, ticket: Ticket, account: Account
    ) -> AsyncGenerator[asyncio.Task[PrefillReport], None]:
        """A Prefill/Run in progress; leaving cancels it."""
        request = account.request
        start = admitted.identity.start if admitted.logits_only else ticket.held_tokens
        admitted = replace(admitted, identity=replace(admitted.identity, start=start))
        run = run_prefill(self._channels, pair.prefill.address, request, admitted, ticket, left_s(request))
        job = self._pool.begin(pair.prefill, len(request.prompt_ids), len(request.prompt_ids))
        task = asyncio.create_task(run, name=f"{request.id}-prefill")
        try:
            yield task
        finally:
            await settled(task)
            self._pool.end(job)

    async def _stream(
        self,
        event: DecodeEvent,
        call: DecodeCall,
        prefill: asyncio.Task[PrefillReport] | None,
        account: Account,
        backlog: Backlog,
    ) -> Finish:
        """Forwards tokens until the finish, which waits a little for the prefill worker's numbers."""
        while isinstance(event, TokenBatch):
            account.tokens(event)
            await backlog.put(event)
            event = await call.next()
        if not isinstance(event, Finish):
            raise unexpected(event, "among the tokens")
        if prefill is not None:
            await self._settle(prefill, account)
        self._planner.remember(account)
        if account.request.want_record:
            await backlog.put(account.record())
        await backlog.put(account.finish(event))
        return event

    async def _settle(self, prefill: asyncio.Task[PrefillReport], account: Account) -> None:
        """Takes the prefill worker's figures; the answer is complete without them."""
        done, _ = await asyncio.wait({prefill}, timeout=self._settings.settle_s)
        error = prefill.exception() if done else None
        if done and error is None:
            account.report = prefill.result()
        else:
            account.note(f"prefill worker {account.prefill_worker} gave no account: {error or 'still running'}")


def check_admitted(request: Request, pair: Pair, admitted: Admitted, allow_lossy: bool) -> None:
    """Compares again what the gate compared from the registry: the worker may have changed since."""
    check_compatible(pair.prefill.record.contract, admitted.contract, allow_lossy)
    expected = HandoffIdentity(
        contract_digest=request.contract_digest,
        adapter_digest=None,
        tenant=request.tenant,
        prompt_digest=prompt_digest(request.prompt_ids),
        start=admitted.identity.start,
        end=len(request.prompt_ids),
    )
    check_identity(expected, admitted.identity)


def left_s(request: Request) -> float:
    return max(0.001, request.deadline - time.monotonic())
