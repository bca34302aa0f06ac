"""Who is refused when more comes than can be served: by what waits, on a pool whose rates the test writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from pdserve.client import AsyncClient
from pdserve.errors import Exhausted
from pdserve.registry.records import Load
from pdserve.request import SamplingParams
from pdserve.rpc.status import to_detail
from router.gate import Pair
from router.jobs import Job
from router.overload import OVERLOADED, Overload, place_wait_s
from router.pool import Pool
from router.record import Account
from router.request import Request
from router.settings import RouterSettings
from tests.clock import Clock
from tests.router.support import MODEL, House, house
from tests.router.test_planner import planner, pool_of, request_for

RATE = 1000.0  # tokens per second
PREFILLS = Load(pages_total=4096, waiting_limit=1000, prefill_tokens_per_s=RATE)
DECODES = Load(pages_total=4096, waiting_limit=1000, batch_limit=4)
MAX_S = 4.0
LONGEST_S = 1.5 * MAX_S  # for who has little


def asked(tenant: str, tokens: int = 200) -> Request:
    ids = tuple(range(tokens))
    return replace(request_for(8), tenant=tenant, prompt_ids=ids, sampling=SamplingParams(max_tokens=8, seed=0))


class Desk:
    """A pool of one pair, and what it has been given; nothing of it is ever computed unless `finish` says so."""

    def __init__(
        self, pool: Pool, max_wait_s: float = MAX_S, tenants: int = 3, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pool = pool
        self.max_wait_s = max_wait_s
        self.overload = Overload(pool, max_wait_s, tenants, clock)
        self.jobs: list[Job] = []
        self._planner = planner(pool)

    def pair(self, request: Request) -> Pair:
        return self._planner.choose(Account(request))

    def take(self, tenant: str, tokens: int = 200) -> str:
        """The reason of a refusal; empty: it waits from now on."""
        request = asked(tenant, tokens)
        pair = self.pair(request)
        try:
            self.overload.admit(request, pair)
        except Exhausted as error:
            assert error.retryable and error.retry_after_ms > 0
            return error.reason
        self.jobs.append(self.pool.begin(pair.prefill, tokens, 0, tenant=tenant))
        return ""

    def wait_s(self) -> float:
        """Of a prompt that nobody goes before."""
        return sum(job.prompt_tokens for job in self.jobs) / RATE

    def finish(self, count: int) -> None:
        for job in self.jobs[:count]:
            self.pool.end(job)
        del self.jobs[:count]


@pytest.fixture
async def desk() -> Desk:
    return Desk(await pool_of(p=PREFILLS, d=DECODES))


def fill(desk: Desk, tenant: str, tokens: int = 200) -> int:
    """How many of a tenant's requests are taken until one is refused."""
    count = 0
    while not (reason := desk.take(tenant, tokens)):
        count += 1
    assert reason == OVERLOADED
    return count


async def test_one_tenant_alone_may_fill_the_whole_time() -> None:
    desk = Desk(await pool_of(p=PREFILLS, d=DECODES), tenants=0)
    assert fill(desk, "") == 21  # twenty wait four seconds for the last one
    desk.finish(1)
    assert fill(desk, "") == 1


async def test_of_several_tenants_who_floods_gets_half_and_others_find_the_rest(desk: Desk) -> None:
    assert fill(desk, "flood") == 11
    assert not desk.take("other")
    assert desk.take("flood")
    assert fill(desk, "other") >= 4
    assert not desk.take("third")


async def test_a_queue_is_shared_as_time_is() -> None:
    desk = Desk(await pool_of(p=replace(PREFILLS, waiting_limit=20), d=DECODES))
    assert fill(desk, "flood", tokens=20) == 11
    assert fill(desk, "other", tokens=20) >= 4


async def test_a_refusal_says_how_long_what_waits_will_take(desk: Desk) -> None:
    fill(desk, "flood")
    request = asked("flood")
    with pytest.raises(Exhausted) as caught:
        desk.overload.admit(request, desk.pair(request))
    assert caught.value.retry_after_ms == pytest.approx(1000 * desk.wait_s())
    assert caught.value.field == "router.max_wait_s"


async def test_nothing_is_refused_that_is_not_measured_or_not_wished() -> None:
    cold = Desk(await pool_of(p=replace(PREFILLS, prefill_tokens_per_s=0.0), d=DECODES))
    never = Desk(await pool_of(p=PREFILLS, d=DECODES), max_wait_s=0.0)
    for desk in (cold, never):
        assert [desk.take("flood") for _ in range(60)] == [""] * 60


async def test_a_long_prompt_is_not_refused_for_its_own_length() -> None:
    slow = Desk(await pool_of(p=replace(PREFILLS, prefill_tokens_per_s=10.0), d=DECODES))
    assert not slow.take("one")  # twenty seconds
    assert RouterSettings().max_wait_s < RouterSettings().first_token_timeout_s


def test_a_place_in_the_steps_is_waited_for_as_long_as_streams_last() -> None:
    assert place_wait_s(replace(DECODES, running=3), 8.0) == 0.0
    assert place_wait_s(replace(DECODES, running=3, waiting=2), 8.0) == 4.0  # two of four must end
    assert place_wait_s(Load(running=500), 8.0) == 0.0  # an older worker tells no limit


async def test_streams_beyond_the_steps_of_decode_are_refused_like_prompts(desk: Desk) -> None:
    request = asked("flood")
    pair = desk.pair(request)
    desk.overload.streamed(2.0)
    taken = 0
    while taken < 50:
        try:
            desk.overload.admit(request, pair)
        except Exhausted:
            break
        desk.pool.begin(pair.decode, 0, 0, tenant="flood")
        taken += 1
    assert taken == 4 + 4  # half of four seconds is the time in which four of two seconds end
    desk.overload.admit(asked("other"), pair)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(20, 240), st.integers(0, 2)), max_size=60))
async def test_whoever_comes_to_a_crowd_is_let_in_and_the_crowd_has_a_limit(moves: list[tuple[str, int, int]]) -> None:
    """Tenants a to c ask at random, some prompts are done in between: d, who has nothing there, always finds a place,
    unless three others together have left none.
    """
    desk = Desk(await pool_of(p=PREFILLS, d=DECODES), tenants=4)
    longest = 240
    for tenant, tokens, done in moves:
        waited = {name: sum(j.prompt_tokens for j in desk.jobs if j.tenant == name) / RATE for name in "abc"}
        before = desk.wait_s()
        refused = desk.take(tenant, tokens)
        if before <= MAX_S and not waited[tenant]:
            assert not refused, "nothing of its own waits"
        if not refused:
            assert desk.wait_s() <= LONGEST_S + longest / RATE
        desk.finish(done)
    alone = {job.tenant for job in desk.jobs}
    if len(alone) <= 1:
        assert not desk.take("d", longest), "one tenant alone left no room"


TICK_S = 0.25
FLOOD = st.lists(st.tuples(st.integers(20, 240), st.integers(1, 4)), max_size=2)  # tokens of a prompt, how many


class Line(Desk):
    """Computes RATE tokens per second of its own time, first come, first served."""

    def __init__(self, pool: Pool) -> None:
        self._clock, self._left = Clock(), 0.0
        super().__init__(pool, MAX_S / 2, clock=self._clock)

    def pass_by(self, seconds: float) -> None:
        self._clock.now += seconds
        self._left += seconds * RATE
        while self.jobs and self.jobs[0].prompt_tokens <= self._left:
            self._left -= self.jobs[0].prompt_tokens
            self.finish(1)
        self._left = self._left if self.jobs else 0.0


@settings(max_examples=20)
@given(st.lists(FLOOD, min_size=28, max_size=28), st.integers(50, 240))
async def test_a_tenant_below_its_share_is_taken_whatever_another_sends(
    floods: list[list[tuple[int, int]]], tokens: int
) -> None:
    """It asks for a quarter of what can be computed, now and then two fifths of the whole time at once. Its share is a
    half.
    """
    line, owed = Line(await pool_of(p=PREFILLS, d=DECODES)), 0.0
    together = int(0.4 * line.max_wait_s * RATE // tokens)
    for asks in floods:
        owed += TICK_S * RATE / 4
        if owed >= tokens * together:
            assert [line.take("quiet", tokens) for _ in range(together)] == [""] * together
            owed -= tokens * together
        for size, times in (*asks, (240, 3), (30, 3)):
            if "" in [line.take("flood", size) for _ in range(times)]:
                assert line.wait_s() <= line.max_wait_s + size / RATE
        line.pass_by(TICK_S)


PROMPT = list(range(40))


@pytest.fixture
async def crowded() -> AsyncIterator[House]:
    """A router that knows its workers' rates, and has given them more than it lets anybody wait for."""
    async with house(max_wait_s=0.01) as made:
        await made.generate(PROMPT, max_tokens=4)
        await until_measured(made)
        jobs = [made.router.pool.begin(made.member("p0"), len(PROMPT), 0) for _ in range(60)]
        for job in jobs:
            job.started = float("inf")  # no report of the worker will ever contain it
        yield made
        for job in jobs:
            made.router.pool.end(job)


async def until_measured(made: House) -> None:
    async with asyncio.timeout(10.0):
        while not made.member("p0").record.load.prefill_tokens_per_s:
            await asyncio.sleep(0.01)


async def test_both_doors_refuse_before_a_worker_is_asked_and_say_when_to_come_again(crowded: House) -> None:
    begun = crowded.router.orchestrator.outcomes.handed_over
    async with AsyncClient(crowded.router.address) as client:
        with pytest.raises(Exhausted) as caught:
            await client.complete(token_ids=PROMPT, max_tokens=4)
    assert caught.value.reason == OVERLOADED and caught.value.retry_after_ms > 10
    url = f"http://{crowded.router.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as answer:
                await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, stream=stream)
            assert answer.value.code == "overloaded"
            assert int(answer.value.response.headers["retry-after"]) >= 1
    assert crowded.router.orchestrator.outcomes.handed_over == begun
    await crowded.assert_nothing_held()


@pytest.mark.parametrize("load", [{"prefill_tokens_per_s": 1e-300}, {"prefill_token_us": 1e308}, {"step_ms": 1e308}])
async def test_rates_that_no_worker_has_are_a_wait_like_any_other(load: dict[str, float]) -> None:
    """So the error can be told to the caller: its milliseconds are a number of 32 bits."""
    desk = Desk(await pool_of(p=replace(PREFILLS, queued_tokens=2**31, **load), d=DECODES))  # type: ignore[arg-type]
    request = asked("a")
    with pytest.raises(Exhausted) as caught:
        desk.overload.admit(request, desk.pair(request))
    assert to_detail(caught.value).retry_after_ms > 1000 * MAX_S
