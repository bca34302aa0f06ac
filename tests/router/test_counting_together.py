"""What routers tell each other of tenants' limits, and how far they can exceed them: by a clock that tests move."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdserve.registry.quota_notes import Usage
from router.quotas import MAX_OTHERS, REMEMBER_S, Quotas
from tests.clock import Clock
from tests.router.test_quotas import a_request, quotas, refused


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


def test_what_a_forgotten_router_used_is_counted_once_when_it_is_heard_of_again(clock: Clock) -> None:
    """As where more of them tell than are remembered."""
    one, two = two_that_met(clock, requests_per_minute=6)
    assert [refused(one, a_request()) for _ in range(2)] == [None] * 2
    tell_each_other(one, two)
    for number in range(MAX_OTHERS):
        two.learn(b"another %d" % number, {})
    assert refused(two, a_request()) is None  # three of six
    for _ in range(2):
        tell_each_other(one, two)
    assert refused(one, a_request()) is None
    tell_each_other(one, two)
    assert [refused(two, a_request()) for _ in range(2)] == [None] * 2
    assert reason(two) == "TENANT_REQUESTS", "six in this minute"


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
