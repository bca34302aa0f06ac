"""What a tenant may use: counted by a clock that the test moves."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError, Exhausted, PermissionDenied
from pdserve.request import SamplingParams
from router.bucket import Bucket
from router.quotas import SHARE, Quotas
from router.request import Request
from router.tenants import Tenant, read_tenants
from tests.clock import Clock
from tests.router.support import MODEL

KEY = "sk-acme-0123456789abcdef"
OTHER = "sk-zeta-0123456789abcdef"


def a_request(tenant: str = "acme", prompt: int = 10, output: int = 10, n: int = 1) -> Request:
    return Request(
        id="r",
        model=MODEL,
        tenant=tenant,
        prompt_ids=tuple(range(prompt)),
        sampling=SamplingParams(max_tokens=output, seed=0),
        least_tokens=1,
        contract_digest=b"",
        received=0.0,
        deadline=0.0,
        n=n,
    )


def quotas(clock: Clock, places: int = 100, **limits: Any) -> Quotas:
    return Quotas([replace(Tenant.of("acme", KEY), **limits), Tenant.of("zeta", OTHER)], places, clock)


def refused(made: Quotas, request: Request) -> Exhausted | None:
    try:
        with made.running(request) as run:
            run.output_tokens = request.n * request.max_tokens
    except Exhausted as error:
        return error
    return None


def test_requests_per_minute_come_back_evenly(clock: Clock) -> None:
    made = quotas(clock, requests_per_minute=6)
    assert [refused(made, a_request()) for _ in range(6)] == [None] * 6
    error = refused(made, a_request())
    assert error is not None and error.reason == "TENANT_REQUESTS"
    assert error.retryable and error.retry_after_ms == 10_000
    clock.now += 9.9
    assert refused(made, a_request()) is not None
    clock.now += 0.1
    assert refused(made, a_request()) is None
    assert refused(made, a_request()) is not None
    assert refused(made, a_request("zeta")) is None, "another tenant's limits are its own"


def test_tokens_count_with_all_that_may_come_until_the_request_ends(clock: Clock) -> None:
    made = quotas(clock, tokens_per_minute=100)
    with made.running(a_request(prompt=20, output=20, n=3)) as run:
        error = refused(made, a_request(prompt=11, output=10))  # 80 of 100 are spoken for
        assert error is not None and error.reason == "TENANT_TOKENS" and error.retry_after_ms == 600
        run.output_tokens = 15
    assert refused(made, a_request(prompt=55, output=10)) is None  # 35 were used
    assert refused(made, a_request(prompt=1, output=1)) is not None


def test_a_request_that_a_whole_minute_does_not_hold_is_not_told_to_come_again(clock: Clock) -> None:
    error = refused(quotas(clock, tokens_per_minute=100), a_request(prompt=80, output=21))
    assert error is not None and not error.retryable
    assert (error.field, error.retry_after_ms) == ("max_tokens", 0)


def test_requests_in_flight(clock: Clock) -> None:
    made = quotas(clock, concurrent=2)
    with made.running(a_request()), made.running(a_request()):
        error = refused(made, a_request())
        assert error is not None and error.reason == "TENANT_CONCURRENT" and error.retry_after_ms > 0
        assert refused(made, a_request("zeta")) is None
    assert refused(made, a_request()) is None


def test_what_is_refused_is_not_counted(clock: Clock) -> None:
    made = quotas(clock, requests_per_minute=2, tokens_per_minute=100, concurrent=1)
    with made.running(a_request(prompt=1, output=1)):
        for _ in range(5):
            assert refused(made, a_request()) is not None
    assert refused(made, a_request()) is None


def test_a_request_that_fails_gives_back_what_it_did_not_use(clock: Clock) -> None:
    made = quotas(clock, tokens_per_minute=100, concurrent=1)
    with pytest.raises(ZeroDivisionError), made.running(a_request(prompt=10, output=80)):
        raise ZeroDivisionError
    assert refused(made, a_request(prompt=10, output=80)) is None


@given(st.integers(1, 3), st.integers(64, 256))
def test_a_full_router_keeps_room_for_one_more_tenant(tenants: int, places: int) -> None:
    """Whatever the others do, each tenant that comes finds a place; one alone gets at most three quarters."""
    names = [f"t{n}" for n in range(tenants + 1)]
    made = Quotas([Tenant.of(name, f"sk-{name}-0123456789abcdef") for name in names], places, Clock())
    with ExitStack() as held:
        for name in names[:-1]:
            count = 0
            while True:
                try:
                    held.enter_context(made.running(a_request(name)))
                except Exhausted as error:
                    assert error.reason == "TENANT_SHARE" and error.retry_after_ms
                    break
                count += 1
            assert count <= -(-SHARE * places // (SHARE + 1))
        assert refused(made, a_request(names[-1])) is None


def test_one_tenant_alone_may_fill_the_router(clock: Clock) -> None:
    made = Quotas([Tenant.of("acme", KEY)], 4, clock)
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(made.running(a_request()))


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 50)), max_size=40))
def test_a_bucket_never_gives_more_than_the_minutes_hold(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    bucket, taken, began = Bucket(100, clock), 0.0, clock.now
    for wait, amount in steps:
        clock.now += wait
        if not bucket.wait_s(amount):
            bucket.use(amount)
            taken += amount
        assert taken <= 100 + (clock.now - began) * 100 / 60 + 1e-6


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"requests_per_minute": -1}, "requests_per_minute"),
        ({"tokens_per_minute": "many"}, "tokens_per_minute"),
        ({"concurrent": True}, "concurrent"),
        ({"models": "small"}, "models"),
        ({"modles": []}, "modles"),
    ],
)
def test_a_limit_that_is_none_is_named(table: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tenants([{"name": "acme", "keys": [KEY], **table}])
    assert caught.value.field == f"router.tenants[0].{field}"


@pytest.mark.parametrize(
    ("models", "asked", "allowed"),
    [
        ((), ("small", "french"), True),
        (("small",), ("small", ""), True),
        (("small",), ("small", "french"), True),
        (("small:french",), ("small", "french"), True),
        (("small:french",), ("small", ""), False),
        (("small:french",), ("small", "german"), False),
        (("small:french",), ("large", "french"), False),
        (("small",), ("large", ""), False),
        (("small",), ("smaller", ""), False),
    ],
)
def test_an_adapter_that_is_not_this_tenants_is_forbidden(
    models: tuple[str, ...], asked: tuple[str, str], allowed: bool, clock: Clock
) -> None:
    made = quotas(clock, models=models)
    if allowed:
        made.check_model("acme", *asked)
        return
    with pytest.raises(PermissionDenied) as caught:
        made.check_model("acme", *asked)
    assert caught.value.reason == "MODEL_NOT_ALLOWED"
    made.check_model("zeta", *asked)
