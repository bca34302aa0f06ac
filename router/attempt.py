"""One decode stream of a request, with as many prefill workers as it takes.

    ADMITTING --> PREFILLING -----> STREAMING --> Finish
        |           |   ^   |          ^   |
        |           |   |   | prefill failed: `retry` on the same decode stream
        |           |   |   v          |   |
        |           |   +- ASKING -----+   |
        |           |       |  the cache had come whole before
        +-----------+-------+--------------+--> error; `Orchestrator` decides what comes next
    the output so far ends it already: from ADMITTING to Finish
    the decode worker computes the prompt itself: COMPUTING there instead of PREFILLING, from ADMITTING or ASKING

An attempt that follows one that has given tokens goes on after them: prefill computes prompt and
output, decode replays the output without sending it again. What decode sends must begin exactly
where the output ends; anything else is an error and never forwarded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from cache_transfer.contract import Ticket
from pdserve.errors import PdserveError
from pdserve.rpc.events import Accepted, Finish, Prefilled, TokenBatch
from router.backlog import Backlog
from router.channels import WorkerChannels
from router.decode_checks import check_admitted, check_end, check_tokens
from router.failures import movable, silent, suspicious, unexpected
from router.gate import Member, Pair
from router.jobs import Job
from router.placement import cache_tokens
from router.planner import Planner
from router.pool import Pool
from router.record import Account
from router.request import Request
from router.settings import RouterSettings
from router.silence import watched
from router.wire import Admitted, DecodeCall, DecodeEvent, PrefillReport, lost, run_prefill, settled


class Attempts:
    """Attempts of one request, one at a time. What they get is in the account and the backlog, also if they fail."""

    def __init__(
        self,
        pool: Pool,
        channels: WorkerChannels,
        settings: RouterSettings,
        planner: Planner,
        account: Account,
        backlog: Backlog,
    ) -> None:
        self._pool = pool
        self._channels = channels
        self._settings = settings
        self._planner = planner
        self._account = account
        self._backlog = backlog
        self._rest: Job | None = None  # the end of a split prompt, until decode has computed it

    async def run(self, pair: Pair) -> Finish:
        """Tokens and finish to the backlog. Raises decode's errors, and prefill's last."""
        account = self._account
        request = account.fitted(pair)
        size = cache_tokens(account.prefill_tokens, request.max_tokens - account.prefilled_output)
        job = self._pool.begin(pair.decode, 0, size, max(1, len(request.choices)), request.tenant)
        # Counted from now on: other requests are placed while decode answers.
        prompt = None if pair.here else self._begin_prompt(pair, request)
        self._rest = self._begin_rest(pair, request)
        try:
            async with DecodeCall(self._channels, pair.decode.address, left_s(request)) as call:
                first = await self._admission(call, pair, request)
                if isinstance(first, Finish):
                    return await self._stream(first, call, pair, request, None)
                check_admitted(request, pair, first, self._settings.allow_lossy)
                account.admitted(first.ticket)
                if not account.accepted:
                    account.accepted = True
                    seed = request.sampling.seed or 0
                    await self._backlog.put(Accepted(request.id, request.served, len(request.prompt_ids), seed))
                return await self._prefill_and_stream(call, pair, request, first, prompt)
        finally:
            self._end_rest()
            for each in (job, prompt):
                if each is not None:
                    self._pool.end(each)

    def _begin_prompt(self, pair: Pair, request: Request) -> Job:
        tokens = pair.handoff_tokens or len(request.ids)
        return self._pool.begin(pair.prefill, tokens, tokens, tenant=request.tenant)

    def _begin_rest(self, pair: Pair, request: Request) -> Job | None:
        """What decode computes of a split prompt."""
        if not pair.split:
            return None
        return self._pool.begin(pair.decode, len(request.ids) - pair.handoff_tokens, 0, tenant=request.tenant)

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._pool.end(self._rest)
            self._rest = None

    async def _admission(self, call: DecodeCall, pair: Pair, request: Request) -> Admitted | Finish:
        """Decode's first answer: a Finish only if it has nothing left to do."""
        limit_s = self._settings.admit_timeout_s
        try:
            async with asyncio.timeout(limit_s):  # connecting included
                await call.open(request, None if pair.here else pair.prefill.record.contract, pair.handoff_tokens)
                event = await call.next()
        except TimeoutError as error:
            raise lost(pair.decode.address, f"no answer within {limit_s:g} s") from error
        goes_on = bool(request.output_ids) or any(choice.output_ids for choice in request.choices)
        if isinstance(event, Admitted) or (isinstance(event, Finish) and goes_on):
            return event
        raise unexpected(event, "before admitting the request")

    async def _prefill_and_stream(
        self, call: DecodeCall, pair: Pair, request: Request, admitted: Admitted, prompt: Job | None
    ) -> Finish:
        account, ticket = self._account, admitted.ticket
        while ticket is not None:
            prompt = prompt or self._begin_prompt(pair, request)
            async with self._prefilling(pair, request, admitted, ticket, prompt) as prefill:
                error = await self._first_word(call, pair, prefill)
                if error is None:
                    return await self._stream(await call.next(), call, pair, request, prefill)
            failed(self._pool, account, pair.prefill, error)
            prompt = None
            following = self._planner.find(account, pair.decode)
            if following is not None and not following.here:  # decode was told what the handoff brings
                same = following.handoff_tokens == pair.handoff_tokens
                choice = replace(following.choice, measured=following.choice.measured and same)
                following = replace(following, handoff_tokens=pair.handoff_tokens, choice=choice)
            if following is not None and following.here and movable(error):
                pair, ticket = following, None
                await call.retry(None)
                account.attempt(pair)
                account.admitted(None)
                break
            # Decode may have had the whole cache before prefill failed: only its own answer tells.
            event = await self._ask_again(call, pair if following is None or following.here else following)
            if not isinstance(event, Ticket):
                return await self._stream(event, call, pair, request, None)
            if following is None or not movable(error):
                raise error
            pair, ticket = following, event
            account.attempt(pair)
            account.admitted(ticket)
        return await self._compute_and_stream(call, pair, request)

    async def _compute_and_stream(self, call: DecodeCall, pair: Pair, request: Request) -> Finish:
        """The decode worker computes the prompt, or had its cache whole before it was asked to."""
        limit_s = self._settings.first_token_timeout_s
        self._end_rest()
        job = self._pool.begin(pair.decode, len(request.ids), 0, tenant=request.tenant)
        try:
            async with asyncio.timeout(limit_s):
                event = await call.next()
        except TimeoutError as error:
            raise silent(pair.decode, limit_s) from error
        finally:
            self._pool.end(job)
        if isinstance(event, Prefilled):
            self._account.computed(event)
            event = await call.next()
        return await self._stream(event, call, pair, request, None)

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
        limit_s = self._settings.first_token_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await call.retry(pair.prefill.record.contract)
                return await call.next()
        except TimeoutError as error:
            raise silent(pair.decode, limit_s) from error

    @asynccontextmanager
    async def _prefilling(
        self, pair: Pair, request: Request, admitted: Admitted, ticket: Ticket, job: Job
    ) -> AsyncGenerator[asyncio.Task[PrefillReport], None]:
        """A Prefill/Run in progress, which ends `job`; leaving cancels it."""
        start = admitted.identity.start if admitted.logits_only else ticket.held_tokens
        admitted = replace(admitted, identity=replace(admitted.identity, start=start))
        if pair.split:
            request = replace(request, prompt_ids=request.ids[: pair.handoff_tokens], output_ids=())
        run = run_prefill(self._channels, pair.prefill.address, request, admitted, ticket, left_s(request))
        task = asyncio.create_task(run, name=f"{request.id}-prefill")
        # Its work is over long before the answer is, and also if this cleaning up is cut short.
        task.add_done_callback(lambda _: self._pool.end(job))
        try:
            yield task
        finally:
            await settled(task)

    async def _stream(
        self,
        event: DecodeEvent,
        call: DecodeCall,
        pair: Pair,
        request: Request,
        prefill: asyncio.Task[PrefillReport] | None,
    ) -> Finish:
        """Forwards tokens, and all finishes but the last; however that comes out, prefill's numbers get a little time
        before the first one.
        """
        account = self._account
        try:
            async with watched(self._pool, pair.decode, self._settings.inter_token_timeout_s) as silence:
                while True:
                    self._end_rest()  # whatever decode says after the admission, it has computed that
                    if isinstance(event, TokenBatch):
                        check_tokens(event, request, account, pair.decode)
                        account.tokens(event)
                        if prefill is not None and prefill.done():  # who looks on need not wait for the end
                            await self._settle(prefill)
                            prefill = None
                        await self._backlog.put(event)
                    elif isinstance(event, Finish):
                        check_end(event, account, pair.decode)
                        account.ended(event)
                        if account.complete:
                            break
                        await self._settle(prefill)
                        prefill = None
                        await self._backlog.put(account.finish(event))
                    elif isinstance(event, Prefilled) and pair.split:
                        account.computed(event)
                    else:
                        raise unexpected(event, "among the tokens")
                    silence.begins()
                    event = await call.next()
                    silence.ends()
        except PdserveError:
            await self._settle(prefill)
            raise
        await self._settle(prefill)
        return event

    async def _settle(self, prefill: asyncio.Task[PrefillReport] | None) -> None:
        """Takes the prefill worker's figures; the answer is complete without them."""
        if prefill is None:
            return
        account = self._account
        done, _ = await asyncio.wait({prefill}, timeout=self._settings.settle_s)
        error = prefill.exception() if done else None
        if done and error is None:
            account.reported(prefill.result())
        else:
            worker = account.trials[-1].pair.prefill.id
            account.note(f"prefill worker {worker} gave no account: {error or 'still running'}")


def failed(pool: Pool, account: Account, member: Member, error: PdserveError) -> None:
    """Notes whose fault an attempt's end was."""
    if suspicious(error):
        pool.suspect(member)
    account.failed(member, error)


def left_s(request: Request) -> float:
    return max(0.001, request.deadline - time.monotonic())
