"""What each tenant uses, and may: requests and tokens per minute, requests in flight, its part of a full router.

    request --running()--> refused with Exhausted and the time to wait, or counted until it ends
    what this router counted --news()--> note --board--> learn() at the other routers

No request waits for another router. Each applies at once what it sees itself, and within a
second or so what others saw, so that together they exceed a limit by at most what comes in that
time. A minute's limits are token buckets: they hold one minute's worth, fill evenly, and others'
use may empty them below zero, which is then waited out.

A router that fills up keeps room for tenants who come later: one tenant has at most SHARE times
as many requests in flight as places are free (the dynamic threshold of shared buffers, Choudhury
and Hahne 1998). A single tenant gets three quarters, one that comes then three quarters of the
rest; as requests end, four busy tenants come to 3/13 each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdserve.errors import Exhausted, PermissionDenied, shown
from router.request import Request
from router.tenants import Tenant

SHARE = 3
REMEMBER_S = 10.0  # how long another router's requests in flight count without news from it

Clock = Callable[[], float]


class Bucket:
    """A minute's worth of something, filling evenly. `level` is what is left; below zero it is owed."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; 0: it is."""
        self._fill()
        return max(0.0, (amount - self._level) * 60.0 / self.per_minute)

    def use(self, amount: float) -> None:
        """May go below zero, to no less than a whole minute's worth. Negative: gives back."""
        self._fill()
        self._level = min(self.per_minute, max(-self.per_minute, self._level - amount))

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now


@dataclass
class Used:
    """Of one tenant, since the last note. Mutable."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Usage:
    """What another router said of one tenant."""

    requests: int
    tokens: int
    running: int


@dataclass
class Running:
    """One request that counts; `output_tokens` is kept up to date by who runs it."""

    output_tokens: int = 0


@dataclass
class _Account:
    tenant: Tenant
    requests: Bucket | None
    tokens: Bucket | None
    running: int = 0
    news: Used = field(default_factory=Used)


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
        self._others: dict[bytes, tuple[float, Mapping[str, int]]] = {}  # router -> until when, tenant -> running

    def check_model(self, tenant: str, model: str, adapter: str) -> None:
        """Raises PermissionDenied for a model that the tenant may not use."""
        account = self._accounts.get(tenant)
        if account is not None and not account.tenant.may_use(model, adapter):
            raise PermissionDenied(
                f"this key may not use {shown(f'{model}:{adapter}' if adapter else model)}",
                reason="MODEL_NOT_ALLOWED",
                field="model",
                remedy=f"use one of: {', '.join(account.tenant.models)}",
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
        self._count(account, 1, tokens)
        account.running += 1
        try:
            yield run
        finally:
            account.running -= 1
            self._count(account, 0, min(0, run.output_tokens - output))

    def news(self) -> dict[str, Usage]:
        """What is new since the last call, and what runs, by tenant; others are to `learn` it."""
        said = {}
        for name, account in self._accounts.items():
            used, account.news = account.news, Used()
            if used != Used() or account.running:
                said[name] = Usage(used.requests, used.tokens, account.running)
        return said

    def learn(self, router: bytes, said: Mapping[str, Usage]) -> None:
        """From another router's `news`."""
        for name, usage in said.items():
            account = self._accounts.get(name)
            if account is not None:
                self._apply(account, usage.requests, usage.tokens)
        self._others[router] = (self._clock() + REMEMBER_S, {name: usage.running for name, usage in said.items()})

    def _account(self, tenant: Tenant) -> _Account:
        rates = (tenant.requests_per_minute, tenant.tokens_per_minute)
        requests, tokens = (Bucket(rate, self._clock) if rate else None for rate in rates)
        return _Account(tenant, requests, tokens)

    def _check(self, account: _Account, tokens: int) -> None:
        tenant = account.tenant
        if account.tokens is not None and tokens > account.tokens.per_minute:
            raise Exhausted(
                f"the request may take {tokens} tokens, and a minute has {account.tokens.per_minute} for this key",
                reason="TENANT_TOKENS",
                field="max_tokens",
                remedy="lower max_tokens, or send a shorter prompt",
                retryable=False,
            )
        for bucket, amount, what in ((account.requests, 1, "requests"), (account.tokens, tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(amount)):
                limit = f"{bucket.per_minute} {what} per minute"
                raise _exhausted(f"TENANT_{what.upper()}", f"this key has {limit}", f"{what}_per_minute", wait_s)
        everywhere = account.running + self._elsewhere()[tenant.name]
        if tenant.concurrent and everywhere >= tenant.concurrent:
            problem = f"{everywhere} requests with this key are in flight, of {tenant.concurrent}"
            raise _exhausted("TENANT_CONCURRENT", problem, "concurrent")
        free = self._places - sum(each.running for each in self._accounts.values())
        # The last free place is for a tenant that has none.
        if len(self._accounts) > 1 and account.running and account.running >= SHARE * (free - 1):
            problem = f"the router is busy, and {account.running} requests of it are this key's"
            raise _exhausted("TENANT_SHARE", problem, "router.max_active")

    def _count(self, account: _Account, requests: int, tokens: int) -> None:
        self._apply(account, requests, tokens)
        account.news.requests += requests
        account.news.tokens += tokens

    def _apply(self, account: _Account, requests: int, tokens: int) -> None:
        for bucket, amount in ((account.requests, requests), (account.tokens, tokens)):
            if bucket is not None:
                bucket.use(amount)

    def _elsewhere(self) -> Counter[str]:
        """Requests in flight at other routers, of those that were heard of lately."""
        now = self._clock()
        self._others = {router: said for router, said in self._others.items() if said[0] > now}
        return sum((Counter(running) for _, running in self._others.values()), Counter[str]())


def _exhausted(reason: str, problem: str, limit: str, wait_s: float = 1.0) -> Exhausted:
    return Exhausted(
        problem,
        reason=reason,
        field=limit,
        remedy="send the request again later",
        retry_after_ms=max(1, round(1000 * wait_s)),
    )
