"""What each tenant uses, and may: requests and tokens per minute, requests in flight, its part of a full router.

    request --running()--> refused with Exhausted and the time to wait, or counted until it ends
    what this router has counted --told()--> router/shared_quotas.py --> learn() at the other routers

No request waits for another router. Each applies at once what it sees itself, and within `share_s` what others saw;
shared_quotas.py says by how much they may exceed a limit together. A minute's limits are token buckets (bucket.py).
What routers tell each other are sums since they started, so that nothing is lost or counted twice when an exchange
fails; who meets a router for the first time, as after a start of its own, takes over what is owed there.

A router that fills up keeps room for tenants who come later: one tenant has at most SHARE times
as many requests in flight as places are free (the dynamic threshold of shared buffers, Choudhury
and Hahne 1998). A single tenant gets three quarters, one that comes then three quarters of the
rest; as requests end, four busy tenants come to 3/13 each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.errors import Exhausted, PermissionDenied, shown
from pdserve.registry.quota_notes import Usage
from router.bucket import Bucket, Clock
from router.request import Request
from router.tenants import Tenant

SHARE = 3
LOOKS = 10  # questions that no worker answers, such as /tokenize, that count as one request
REMEMBER_S = 10.0  # how long another router's requests in flight count without news from it
FORGET_S = 600.0  # how long its sums are kept: a Redis that lost them is told them again
MAX_OTHERS = 4096  # notes; one that is forgotten is met anew


@dataclass
class Running:
    """One request that counts; `output_tokens` is kept up to date by who runs it."""

    output_tokens: int = 0


@dataclass
class _Account:
    """Of one tenant. Mutable."""

    tenant: Tenant
    requests: Bucket | None
    tokens: Bucket | None
    running: int = 0
    begun: int = 0  # requests, since this router started
    used: int = 0  # tokens
    looks: int = 0

    def count(self, requests: int, tokens: int) -> None:
        self.begun += requests
        self.used += tokens
        for bucket, amount in ((self.requests, requests), (self.tokens, tokens)):
            if bucket is not None:
                bucket.use(amount)

    def usage(self) -> Usage:
        owed = [bucket.owed if bucket is not None else 0.0 for bucket in (self.requests, self.tokens)]
        return Usage(self.begun, self.used, self.running, *owed)

    def learn(self, now: Usage, before: Usage | None, age_s: float) -> None:
        """`before`: what that router said last, all zero for a tenant that is new there; None: it was not known."""
        pairs = ((self.requests, "requests"), (self.tokens, "tokens"))
        for bucket, what in pairs:
            if bucket is None:
                continue
            owed = getattr(now, f"{what}_owed")
            if before is None:
                bucket.owe(owed, age_s)
                continue
            more = getattr(now, what) - getattr(before, what)
            # What has come back there since it was last told, as for want of room in a note, is not owed here either.
            bucket.use_elsewhere(min(more, owed))


@dataclass(frozen=True)
class _Other:
    """Another router, or those of its tenants that one of its notes is of."""

    heard: float  # on this router's clock, when it was last read
    until: float  # so long its requests in flight count
    running: Mapping[str, int]  # by tenant, of its last note
    sums: Mapping[str, Usage]  # by tenant, as last told


class Quotas:
    """Belongs to one event loop.

    Args:
        tenants: those with keys; without any there is one tenant, and no limit but the router's.
        places: requests that the router has in flight at most.
    """

    def __init__(self, tenants: Iterable[Tenant], places: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._places = places
        self._accounts = {tenant.name: self._account(tenant) for tenant in tenants}
        self._others: dict[bytes, _Other] = {}

    @property
    def counted(self) -> tuple[str, ...]:
        """Tenants of whom there is anything to count together with other routers."""
        return tuple(name for name, account in self._accounts.items() if account.tenant.limited)

    def may_use(self, tenant: str, model: str, adapter: str) -> bool:
        account = self._accounts.get(tenant)
        return account is None or account.tenant.may_use(model, adapter)

    def check_model(self, tenant: str, model: str, adapter: str) -> None:
        """Raises PermissionDenied for a model or adapter that the tenant may not use."""
        if not self.may_use(tenant, model, adapter):
            raise PermissionDenied(
                f"this key may not use {shown(f'{model}:{adapter}' if adapter else model)}",
                reason="MODEL_NOT_ALLOWED",
                field="model",
                remedy=f"use one of: {', '.join(self._accounts[tenant].tenant.models)}",
            )

    @contextmanager
    def running(self, request: Request) -> Iterator[Running]:
        """Counts a request until it ends.

        Raises Exhausted with a time to wait: TENANT_REQUESTS, TENANT_TOKENS, TENANT_CONCURRENT, TENANT_SHARE. Nothing
        is counted then.
        """
        account = self._accounts.get(request.tenant)
        run = Running()
        if account is None:
            yield run
            return
        output = request.n * request.max_tokens
        tokens = len(request.prompt_ids) + output
        self._check(account, tokens)
        account.count(1, tokens)
        account.running += 1
        try:
            yield run
        finally:
            account.running -= 1
            account.count(0, min(0, run.output_tokens - output))

    def look(self, tenant: str) -> None:
        """Counts a question that only this router works for. Raises Exhausted (TENANT_REQUESTS) with a time to wait."""
        account = self._accounts.get(tenant)
        if account is None:
            return
        _check_rate(account.requests, 1, "requests")
        account.looks += 1
        if account.looks % LOOKS == 0:
            account.count(1, 0)

    def check_together(self, requests: Sequence[Request]) -> None:
        """For the prompts of one call: raises Exhausted, as `running` would, where they would not all be taken now.

        Otherwise those that are would be computed and charged for nothing, as often as the call is sent again. Counts
        nothing.
        """
        count = len(requests)
        if count > self._places:
            raise _too_many(count, self._places, "ROUTER_FULL", "router.max_active")
        account = self._accounts.get(requests[0].tenant)
        if account is None:
            return
        tenant = account.tenant
        if tenant.requests_per_minute and count > tenant.requests_per_minute:
            raise _too_many(count, tenant.requests_per_minute, "TENANT_REQUESTS", "requests_per_minute")
        if tenant.concurrent and count > tenant.concurrent:
            raise _too_many(count, tenant.concurrent, "TENANT_CONCURRENT", "concurrent")
        if len(self._accounts) > 1 and self._beyond_share(count - 1, self._places - count + 1):
            raise _too_many(count, self._places * SHARE // (SHARE + 1), "TENANT_SHARE", "router.max_active")
        self._check(account, sum(len(each.prompt_ids) + each.n * each.max_tokens for each in requests), count)

    def told(self) -> dict[str, Usage]:
        """What other routers are to `learn`, by tenant: of those who use something now."""
        usages = ((name, each.usage()) for name, each in self._accounts.items() if each.tenant.limited and each.begun)
        return {name: usage for name, usage in usages if usage.busy}

    def learn(self, router: bytes, said: Mapping[str, Usage], age_s: float = 0.0) -> None:
        """What another router `told` so long ago; `router` names one start of it."""
        now = self._clock()
        known = self._others.pop(router, None)
        said = {name: usage for name, usage in said.items() if name in self._accounts}
        for name, usage in said.items():
            before = None if known is None else known.sums.get(name, Usage())
            self._accounts[name].learn(usage, before, age_s)
        running = {name: usage.running for name, usage in said.items()}
        sums = {**({} if known is None else known.sums), **said}
        self._others[router] = _Other(now, now + REMEMBER_S - age_s, running, sums)
        while len(self._others) > MAX_OTHERS or self._longest_silent.heard <= now - FORGET_S:
            del self._others[next(iter(self._others))]

    @property
    def _longest_silent(self) -> _Other:
        """Whoever is heard of goes to the end of the dict."""
        return next(iter(self._others.values()))

    def _account(self, tenant: Tenant) -> _Account:
        rates = (tenant.requests_per_minute, tenant.tokens_per_minute)
        requests, tokens = (Bucket(rate, self._clock) if rate else None for rate in rates)
        return _Account(tenant, requests, tokens)

    def _check(self, account: _Account, tokens: int, count: int = 1) -> None:
        tenant = account.tenant
        if account.tokens is not None and tokens > account.tokens.per_minute:
            raise Exhausted(
                f"the request may take {tokens} tokens, and a minute has {account.tokens.per_minute} for this key",
                reason="TENANT_TOKENS",
                field="max_tokens",
                remedy="lower max_tokens, or send a shorter prompt",
                retryable=False,
            )
        _check_rate(account.requests, count, "requests")
        _check_rate(account.tokens, tokens, "tokens")
        everywhere = account.running + self._elsewhere(tenant.name)
        if tenant.concurrent and everywhere + count > tenant.concurrent:
            problem = f"requests in flight with this key: {everywhere} of {tenant.concurrent}"
            raise _exhausted("TENANT_CONCURRENT", problem, "concurrent")
        free = self._places - sum(each.running for each in self._accounts.values())
        before = account.running + count - 1  # the last one's own, when it comes
        if len(self._accounts) > 1 and self._beyond_share(before, free - count + 1):
            problem = f"the router is busy, and this key has its part of it; requests in flight: {account.running}"
            raise _exhausted("TENANT_SHARE", problem, "router.max_active")

    @staticmethod
    def _beyond_share(running: int, free: int) -> bool:
        """Whether a tenant with so many has its part. The last free place is for a tenant that has none."""
        return running > 0 and running >= SHARE * (free - 1)

    def _elsewhere(self, tenant: str) -> int:
        """Its requests in flight at other routers, of those that were heard of lately."""
        now = self._clock()
        return sum(other.running.get(tenant, 0) for other in self._others.values() if other.until > now)


def _check_rate(bucket: Bucket | None, amount: int, what: str) -> None:
    if bucket is not None and (wait_s := bucket.wait_s(amount)):
        limit = f"{bucket.per_minute} {what} per minute"
        raise _exhausted(f"TENANT_{what.upper()}", f"this key has {limit}", f"{what}_per_minute", wait_s)


def _too_many(count: int, most: int, reason: str, limit: str) -> Exhausted:
    problem = f"there are {count} prompts, and at most {most} requests"
    return Exhausted(problem, reason=reason, field=limit, remedy="send fewer prompts in one request", retryable=False)


def _exhausted(reason: str, problem: str, limit: str, wait_s: float = 1.0) -> Exhausted:
    return Exhausted(
        problem,
        reason=reason,
        field=limit,
        remedy="send the request again later",
        retry_after_ms=max(1, round(1000 * wait_s)),
    )
