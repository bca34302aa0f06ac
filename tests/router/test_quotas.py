"""What a tenant may use: counted by a clock that the test moves, and refused at both doors before any work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from pdserve.client import AsyncClient
from pdserve.errors import ConfigError, Exhausted, PermissionDenied
from pdserve.registry.quota_notes import Usage
from pdserve.request import SamplingParams
from router.bucket import Bucket
from router.quotas import REMEMBER_S, SHARE, Quotas
from router.request import Request
from router.tenants import Tenant, read_tenants
from tests.router.support import MODEL, House, house

KEY = "sk-acme-0123456789abcdef"
OTHER = "sk-zeta-0123456789abcdef"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


def two_that_met(clock: Clock, **limits: Any) -> tuple[Quotas, Quotas]:
    one, two = (quotas(clock, **limits) for _ in range(2))
    tell_each_other(one, two)
    return one, two


def tell_each_other(one: Quotas, two: Quotas) -> None:
    two.learn(b"one", one.told())
    one.learn(b"two", two.told())


def test_routers_count_together(clock: Clock) -> None:
    one, two = two_that_met(clock, requests_per_minute=4, tokens_per_minute=1000, concurrent=3)
    with one.running(a_request()), one.running(a_request()):
        for _ in range(3):
            tell_each_other(one, two)  # what is told again is not counted again
        with two.running(a_request()):  # two there, one here
            assert reason(two) == "TENANT_CONCURRENT"
            tell_each_other(one, two)
            assert reason(one) == "TENANT_CONCURRENT"
        assert refused(two, a_request()) is None
        tell_each_other(one, two)
        assert [reason(one), reason(two)] == ["TENANT_REQUESTS"] * 2, "four in this minute"
    clock.now += 15.0
    assert refused(one, a_request()) is None
    tell_each_other(one, two)
    assert reason(two) == "TENANT_REQUESTS"


def reason(made: Quotas) -> str:
    error = refused(made, a_request())
    return "" if error is None else error.reason


def test_tokens_count_elsewhere_as_they_were_put_out_in_the_end(clock: Clock) -> None:
    one, two = two_that_met(clock, tokens_per_minute=100)
    with one.running(a_request(prompt=20, output=60)) as run:
        tell_each_other(one, two)
        error = refused(two, a_request(prompt=11, output=10))  # 80 of 100 are spoken for
        assert error is not None and error.reason == "TENANT_TOKENS" and error.retry_after_ms == 600
        run.output_tokens = 15
    tell_each_other(one, two)
    assert refused(two, a_request(prompt=55, output=10)) is None  # 35 were used
    assert one.told()["acme"].tokens == 35


def test_a_router_that_starts_takes_over_what_is_owed(clock: Clock) -> None:
    one, two = two_that_met(clock, requests_per_minute=6)
    assert [refused(one, a_request()) for _ in range(3)] == [None] * 3
    assert [refused(two, a_request()) for _ in range(2)] == [None] * 2
    tell_each_other(one, two)
    clock.now += 10.0  # one comes back
    late = quotas(clock, requests_per_minute=6)
    late.learn(b"one", one.told())
    late.learn(b"two, which was told ten seconds ago", {"acme": Usage(2, 40, 0, 5.0)}, age_s=10.0)
    assert [refused(late, a_request()) for _ in range(2)] == [None] * 2
    assert reason(late) == "TENANT_REQUESTS"


def test_a_redis_that_lost_its_memory_changes_nothing_that_is_known(clock: Clock) -> None:
    """The next notes have the same sums, whatever became of the last ones."""
    one, two = two_that_met(clock, requests_per_minute=4)
    for each in (one, two):
        assert refused(each, a_request()) is None
    tell_each_other(one, two)
    clock.now += 100.0  # without an exchange; everything has come back
    assert refused(one, a_request()) is None
    tell_each_other(one, two)
    assert [refused(two, a_request()) for _ in range(3)] == [None] * 3
    assert reason(two) == "TENANT_REQUESTS"


def test_a_tenant_of_whom_nothing_is_said_has_nothing_in_flight(clock: Clock) -> None:
    one, two = two_that_met(clock, concurrent=1)
    with one.running(a_request()):
        tell_each_other(one, two)
        assert reason(two) == "TENANT_CONCURRENT"
    tell_each_other(one, two)
    assert one.told() == {} and refused(two, a_request()) is None


def test_what_was_used_between_two_words_of_a_tenant_is_counted_once(clock: Clock) -> None:
    """Nobody is told of while nothing is used, and the next word has the sum of before in it."""
    one, two = two_that_met(clock, requests_per_minute=6)
    for _ in range(3):
        assert refused(one, a_request()) is None
        tell_each_other(one, two)
        clock.now += 60.0
        tell_each_other(one, two)
        assert one.told() == {}
    assert refused(one, a_request()) is None
    tell_each_other(one, two)
    assert [refused(two, a_request()) for _ in range(5)] == [None] * 5
    assert reason(two) == "TENANT_REQUESTS"


def test_a_router_that_is_gone_is_forgotten(clock: Clock) -> None:
    made = quotas(clock, concurrent=1)
    gone = {"acme": Usage(1, 0, 1), "nobody": Usage(1, 1, 1)}
    made.learn(b"gone", gone)
    assert refused(made, a_request()) is not None
    for _ in range(10):  # its note is there for longer than it
        clock.now += REMEMBER_S / 10
        made.learn(b"gone", gone, age_s=clock.now - 100.0)
    assert refused(made, a_request()) is None


def test_others_use_is_waited_out_and_never_for_longer_than_two_minutes(clock: Clock) -> None:
    made = quotas(clock, requests_per_minute=60)
    made.learn(b"two", {})
    made.learn(b"two", {"acme": Usage(10_000, 0, 0, 10_000.0)})
    error = refused(made, a_request())
    assert error is not None and error.retry_after_ms == 61_000
    clock.now += 61
    assert refused(made, a_request()) is None


def test_no_word_of_others_makes_a_router_give_more_than_the_limit(clock: Clock) -> None:
    made = quotas(clock, requests_per_minute=4)
    assert [refused(made, a_request()) for _ in range(4)] == [None] * 4
    for said in (10_000, 0, 10_000, 0):  # use that is given back, over and over
        made.learn(b"liar", {"acme": Usage(said, 0, 0, 0.0)})
        clock.now += 0.1
    assert reason(made) == "TENANT_REQUESTS"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 5), st.integers(0, 12), st.booleans()), min_size=1, max_size=30)
)
def test_routers_exceed_a_limit_by_what_comes_between_two_exchanges(
    steps: list[tuple[int, float, int, bool]],
) -> None:
    """Three routers; each step asks one of them for some requests, and all exchange after some of the steps."""
    clock = Clock()
    made = [quotas(clock, requests_per_minute=20) for _ in range(3)]
    began, admitted, since = clock.now, 0, [0, 0, 0]
    beyond = 0
    for which, wait, asked, exchanged in steps:
        clock.now += wait
        for _ in range(asked):
            if refused(made[which], a_request()) is None:
                admitted += 1
                since[which] += 1
        if exchanged:
            beyond += sum(since) - max(since)  # what one could not know of another
            since = [0, 0, 0]
            notes = [each.told() for each in made]
            for at, each in enumerate(made):
                for other, note in enumerate(notes):
                    if other != at:
                        each.learn(b"%d" % other, note)
        open_now = sum(since) - max(since)
        assert admitted <= 20 + (clock.now - began) * 20 / 60 + beyond + open_now + 1e-6


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


@pytest.fixture
async def made() -> AsyncIterator[House]:
    limits: dict[str, Any] = {"requests_per_minute": 3, "tokens_per_minute": 400, "concurrent": 2, "models": (MODEL,)}
    zeta = replace(Tenant.of("zeta", OTHER), models=("another",))
    async with house(tenants=(replace(Tenant.of("acme", KEY), **limits), zeta)) as it:
        yield it


async def test_both_doors_refuse_before_any_work(made: House) -> None:
    """429 with Retry-After over HTTP, RESOURCE_EXHAUSTED over gRPC; the third of three requests is the last."""
    url = f"http://{made.router.http_address}/v1"
    async with (
        AsyncClient(made.router.address, api_key=KEY) as grpc_client,
        AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as peer,
    ):
        for _ in range(2):
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2)
        await grpc_client.complete("the cat", sampling=SamplingParams(max_tokens=2))
        steps = [worker.record().load.steps for worker in made.workers]
        with pytest.raises(openai.RateLimitError) as caught:
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2)
        assert caught.value.status_code == 429
        assert 0 < int(caught.value.response.headers["retry-after"]) <= 20
        with pytest.raises(openai.RateLimitError):
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2, stream=True)
        with pytest.raises(Exhausted) as too_many:
            await grpc_client.complete("the cat", sampling=SamplingParams(max_tokens=2))
        assert too_many.value.reason == "TENANT_REQUESTS" and too_many.value.retry_after_ms
        assert [worker.record().load.steps for worker in made.workers] == steps


async def test_a_model_that_is_not_this_tenants_is_forbidden(made: House) -> None:
    async with (
        AsyncClient(made.router.address, api_key=OTHER) as client,
        AsyncOpenAI(base_url=f"http://{made.router.http_address}/v1", api_key=OTHER, max_retries=0) as peer,
    ):
        with pytest.raises(PermissionDenied) as caught:
            await client.complete("the cat")
        assert caught.value.reason == "MODEL_NOT_ALLOWED" and "another" in caught.value.remedy
        with pytest.raises(openai.PermissionDeniedError):
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2)


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


async def test_what_a_tenant_may_not_use_it_is_not_told_of_either(made: House) -> None:
    async with (
        AsyncClient(made.router.address, api_key=OTHER) as client,
        AsyncOpenAI(base_url=f"http://{made.router.http_address}/v1", api_key=OTHER, max_retries=0) as peer,
        httpx.AsyncClient(
            base_url=f"http://{made.router.http_address}", headers={"authorization": f"Bearer {OTHER}"}
        ) as http,
    ):
        assert [listed.id async for listed in peer.models.list()] == []
        with pytest.raises(openai.NotFoundError):
            await peer.models.retrieve(MODEL)
        assert await client.models() == ()
        for path, body in (("/tokenize", {"prompt": "the cat"}), ("/detokenize", {"tokens": [1, 2]})):
            answer = await http.post(path, json={"model": MODEL, **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    async with AsyncOpenAI(base_url=f"http://{made.router.http_address}/v1", api_key=KEY, max_retries=0) as peer:
        assert [listed.id async for listed in peer.models.list()] == [MODEL]


async def test_a_client_that_goes_away_counts_no_longer(made: House) -> None:
    async with AsyncClient(made.router.address, api_key=KEY) as client:
        for _ in range(2):
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            async with aclosing(client.generate("the cat", sampling=params)) as events:
                await anext(events)
        await made.router.orchestrator.idle()
        assert made.router.quotas.told()["acme"].running == 0
        # 200 tokens were spoken for, of 400; nearly all have come back.
        await client.complete("the cat", sampling=SamplingParams(max_tokens=300))
