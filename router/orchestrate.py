"""One request from placement to its last token, over as many pairs of workers as it takes.

    PLACING --> ADMITTING --> PREFILLING --> STREAMING --> DONE
       ^            |           |  ^   |         |
       |            |           |  |   | prefill failed: `retry` on the same decode stream
       |            |           |  +---+         |
       +------------+-----------+                +--> FAILED (typed error, never a finish)
        decode failed: another pair

Before the first token a retryable failure moves the request to an untried pair while its
deadline lasts; anything else, and any failure afterwards, is the client's to see. A worker
lost at the transport leaves the rotation at once. Leaving `generate` early, as a client that
disconnects does, cancels the calls to both workers.

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
from pdserve.errors import DeadlineExceeded, Internal, PdserveError, Refused
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.events import Accepted, Finish, TokenBatch
from router.backlog import Backlog, Event
from router.gate import Member, Pair, explain
from router.placement import Demand, place, room
from router.pool import Pool
from router.prefixes import PrefixRecord, chain
from router.record import Account
from router.request import Request, router_full
from router.settings import RouterSettings
from router.wire import WORKER_LOST, Admitted, DecodeCall, DecodeEvent, PrefillReport, lost, run_prefill, settled

# A worker's own time limit or state, which another worker need not share.
_MOVABLE = (DeadlineExceeded, Refused)


class Orchestrator:
    """Runs requests; belongs to one event loop. At most `max_active` are in flight."""

    def __init__(
        self, pool: Pool, channels: ChannelPool, settings: RouterSettings, rng: random.Random | None = None
    ) -> None:
        self._pool = pool
        self._channels = channels
        self._settings = settings
        self._rng = rng or random.Random()
        self._prefixes = PrefixRecord(settings.prefix_blocks)
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        return self._active

    async def idle(self) -> None:
        """Returns once no request is in flight."""
        await self._idle.wait()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Accepted, token batches, the record if wanted, and a Finish; or a PdserveError on the way.

        Close the generator (`aclosing`) to cancel. Raises Exhausted at once when too many are active.
        """
        if self._active >= self._settings.max_active:
            raise router_full(self._active)
        backlog = Backlog(self._settings.backlog_tokens)
        task = asyncio.create_task(self._run(request, backlog), name=request.id)
        self._active += 1
        self._idle.clear()
        task.add_done_callback(self._ended)
        task.add_done_callback(backlog.ended)
        try:
            while (event := await backlog.get()) is not None:
                yield event
        finally:
            await settled(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._active -= 1
        if not self._active:
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
            late = deadline_exceeded(request, account)
            outcome = late.reason
            raise late from error
        except PdserveError as error:
            outcome = error.reason
            raise
        finally:
            account.log(outcome)

    async def _attempts(self, account: Account, backlog: Backlog) -> Finish:
        while True:
            pair = self._choose(account)
            account.attempt(pair)
            try:
                return await self._on_pair(pair, account, backlog)
            except PdserveError as error:
                if error is not account.last_error:  # else a prefill worker's, judged already
                    self._judge(pair.decode, error, account)

    def _judge(self, member: Member, error: PdserveError, account: Account) -> None:
        """Returns if another attempt may follow; otherwise raises the error."""
        if error.reason == WORKER_LOST:
            self._pool.suspect(member)
        if account.started or not (error.retryable or isinstance(error, _MOVABLE)):
            raise error
        account.failed(member, error)

    def _choose(self, account: Account, decode: Member | None = None) -> Pair:
        """An untried pair, with workers that have not failed this request if there are any.

        Args:
            decode: only pairs with this decode worker.

        Raises the last attempt's error when no pair is left, or why there is none at all.
        """
        request = account.request
        ready = self._pool.ready(request.model)
        verdict = self._pool.gate.judge(ready)
        total = len(request.prompt_ids) + request.max_tokens
        usable = [
            pair
            for pair in verdict.pairs
            if pair.key not in account.tried
            and pair.prefill.contract_digest == request.contract_digest
            and room(pair).total >= total
            and room(pair).prompt >= len(request.prompt_ids)
            and (decode is None or pair.decode.record.incarnation == decode.record.incarnation)
        ]
        if not usable or account.attempts >= self._settings.max_attempts:
            raise account.last_error or explain(ready, verdict, request.model)
        unblamed = [
            pair
            for pair in usable
            if pair.prefill.record.incarnation not in account.blamed
            and (decode is not None or pair.decode.record.incarnation not in account.blamed)
        ]
        demand = Demand(len(request.prompt_ids), total, self._prefixes.held_tokens(self._links(request)))
        return place(unblamed or usable, demand, self._pool.load, self._rng)

    async def _on_pair(self, pair: Pair, account: Account, backlog: Backlog) -> Finish:
        """One decode stream, with as many prefill workers as it takes. Raises decode's errors."""
        request = account.request
        job = self._pool.begin(pair.decode, 0, len(request.prompt_ids) + 1)
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
                await asyncio.wait({prefill, call.reading()}, return_when=asyncio.FIRST_COMPLETED)
                error = prefill.exception() if prefill.done() else None
                if call.reading().done() or error is None:
                    # Decode has spoken, or prefill is done and decode will.
                    return await self._stream(await call.next(), call, prefill, account, backlog)
            if not isinstance(error, PdserveError):
                raise error
            self._judge(pair.prefill, error, account)
            pair = self._choose(account, pair.decode)
            await call.retry(pair.prefill.record.contract)
            event = await call.next()
            if not isinstance(event, Ticket):  # the cache had arrived whole before prefill failed
                return await self._stream(event, call, None, account, backlog)
            account.attempt(pair)
            ticket = event

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
        self._remember(account)
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

    def _remember(self, account: Account) -> None:
        """Both workers of the pair now hold this prompt."""
        links = self._links(account.request)
        for member in self._pool.members():
            if member.id in (account.prefill_worker, account.decode_worker):
                self._prefixes.record(links, member.record.incarnation)

    def _links(self, request: Request) -> tuple[bytes, ...]:
        return chain(request.prompt_ids, request.contract_digest, None, request.tenant)


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


def deadline_exceeded(request: Request, account: Account) -> DeadlineExceeded:
    stage = f"after {account.output_tokens} tokens" if account.started else "before its first token"
    return DeadlineExceeded(
        f"the request was stopped {stage}, {request.deadline - request.received:g} s after it came",
        field="deadline",
        remedy="allow more time, or ask for fewer tokens",
    )


def unexpected(event: DecodeEvent, when: str) -> Internal:
    return Internal(f"a decode worker sent {type(event).__name__} {when}", reason="UNEXPECTED_EVENT", retryable=True)
