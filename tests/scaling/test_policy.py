"""The sizes of the pools on recorded loads: never over the budget, no change for noise, no change taken back."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.registry.records import DECODE, PREFILL, Load
from pdserve.scaling.load import pressure
from pdserve.scaling.plan import ROLES, Plan
from pdserve.scaling.policy import Memory, Seen, decide
from pdserve.scaling.settings import ScalingSettings
from tests.scaling.trace import DRAIN_S, START_S, Cluster, Moment, changes, plan, recorded, sizes

CALM = recorded((0.0, 0.9))


def check_budget(moments: list[Moment], allowed: Plan) -> None:
    """At every tick, with the workers that still drain."""
    for moment in moments:
        assert allowed.fits(moment.taken), moment


class TestAuto:
    def test_a_burst_of_prompts_grows_prefill_and_its_end_shrinks_it(self) -> None:
        allowed = plan(1, 1, mode="auto", budget_cpus=6, prefill_max=4)
        cluster = Cluster(allowed, recorded((0.0, 0.5), (20.0, 3.0), (200.0, 0.3)), CALM)
        moments = cluster.run(600.0)
        assert sizes(moments) == [(1, 1), (2, 1), (3, 1), (2, 1), (1, 1)]
        first = changes(moments, PREFILL)[0]
        held = allowed.settings.up_s
        assert 20.0 + held <= first <= 20.0 + held + 2 * allowed.settings.window_s
        check_budget(moments, allowed)

    def test_a_short_spike_changes_nothing(self) -> None:
        cluster = Cluster(plan(1, 1, mode="auto", budget_cpus=6), recorded((0.0, 0.9), (30.0, 4.0), (31.0, 0.9)), CALM)
        assert sizes(cluster.run(120.0)) == [(1, 1)]

    def test_a_load_that_swings_around_the_threshold_changes_nothing(self) -> None:
        high = ScalingSettings().high

        def swinging(now: float) -> float:
            return 2 * (high + 0.5 * math.sin(now))

        cluster = Cluster(plan(2, 1, mode="auto", budget_cpus=8), swinging, CALM)
        assert sizes(cluster.run(300.0)) == [(2, 1)]

    def test_a_load_between_low_and_high_changes_nothing_at_any_size(self) -> None:
        for workers in range(1, 6):
            at = recorded((0.0, workers * 1.1))
            cluster = Cluster(plan(workers, 1, mode="auto", budget_cpus=12), at, CALM)
            assert sizes(cluster.run(200.0)) == [(workers, 1)]

    def test_a_pool_that_grew_does_not_shrink_for_the_same_load(self) -> None:
        cluster = Cluster(plan(1, 1, mode="auto", budget_cpus=8), recorded((0.0, 1.3)), CALM)
        assert sizes(cluster.run(600.0)) == [(1, 1), (2, 1)]

    def test_it_waits_for_what_it_asked_for_and_for_the_cooldown(self) -> None:
        allowed = plan(1, 1, mode="auto", budget_cpus=12, cooldown_s=20.0)
        moments = Cluster(allowed, recorded((0.0, 9.0)), CALM).run(200.0)
        at = changes(moments, PREFILL)
        assert len(at) >= 3
        assert all(later - sooner >= max(20.0, START_S) for sooner, later in pairwise(at))

    def test_one_change_is_at_most_a_step(self) -> None:
        for step in (1, 2, 3):
            allowed = plan(1, 1, mode="auto", budget_cpus=12, step=step)
            found = sizes(Cluster(allowed, recorded((0.0, 9.0), (150.0, 0.1)), CALM).run(700.0))
            moves = [abs(after[0] - before[0]) for before, after in pairwise(found)]
            assert max(moves) == step, found

    def test_both_pools_stay_between_their_bounds(self) -> None:
        allowed = plan(2, 2, mode="auto", budget_cpus=10, prefill_max=3, decode_min=2, decode_max=4)
        moments = Cluster(allowed, recorded((0.0, 50.0), (200.0, 0.0)), recorded((0.0, 50.0), (300.0, 0.0))).run(900.0)
        prefills, decodes = zip(*sizes(moments), strict=True)
        assert (min(prefills), max(prefills)) == (1, 3)
        assert (min(decodes), max(decodes)) == (2, 4)
        check_budget(moments, allowed)

    def test_without_reports_sizes_stay(self) -> None:
        seen = {role: Seen(2) for role in ROLES}
        memories = {role: Memory(2) for role in ROLES}
        for tick in range(400):
            memories = decide(tick * 0.5, seen, memories, plan(mode="auto", budget_cpus=9))
        assert [memories[role].target for role in ROLES] == [2, 2]


class TestRatio:
    def test_from_prompt_heavy_to_output_heavy_the_workers_move(self) -> None:
        """The whole budget is in use before and after; and never more than that while a worker drains."""
        allowed = plan(2, 2, mode="ratio")
        cluster = Cluster(allowed, recorded((0.0, 4.0), (150.0, 0.4)), recorded((0.0, 0.5), (150.0, 4.0)))
        moments = cluster.run(400.0)
        assert sizes(moments) == [(2, 2), (2, 1), (3, 1), (2, 1), (2, 2), (1, 2), (1, 3)]
        check_budget(moments, allowed)

    def test_the_other_pool_grows_only_when_the_worker_is_gone(self) -> None:
        moments = Cluster(plan(2, 2, mode="ratio"), recorded((0.0, 4.0)), recorded((0.0, 0.5))).run(100.0)
        (shrunk,), (grown,) = changes(moments, DECODE), changes(moments, PREFILL)
        assert grown >= shrunk + DRAIN_S

    def test_a_move_that_would_only_turn_the_tables_is_not_made(self) -> None:
        """Prefill 2.0, decode 1.5: with a worker more and less it would be 1.33 and 3.0."""
        cluster = Cluster(plan(2, 2, mode="ratio"), recorded((0.0, 4.0)), recorded((0.0, 3.0)))
        assert sizes(cluster.run(300.0)) == [(2, 2)]

    def test_pools_without_need_keep_their_workers(self) -> None:
        cluster = Cluster(plan(3, 1, mode="ratio"), recorded((0.0, 0.1)), recorded((0.0, 0.9)))
        assert sizes(cluster.run(300.0)) == [(3, 1)]

    def test_workers_of_unequal_cost_move_within_the_budget(self) -> None:
        """One decode worker costs as much as three of prefill."""
        allowed = plan(1, 3, costs=(1.0, 3.0), mode="ratio")
        moments = Cluster(allowed, recorded((0.0, 4.0)), recorded((0.0, 0.6))).run(300.0)
        assert sizes(moments)[-1] == (4, 2)
        check_budget(moments, allowed)


class TestAsked:
    def test_the_operators_sizes_win_and_are_reached_draining_first(self) -> None:
        allowed = plan(2, 2)
        cluster = Cluster(allowed, CALM, CALM)
        moments = cluster.run(60.0, asked={PREFILL: 1, DECODE: 3})
        assert sizes(moments) == [(1, 2), (1, 3)]
        check_budget(moments, allowed)
        back = cluster.run(60.0)
        assert sizes(back)[-1] == (2, 2), "fixed: the configured sizes"
        check_budget(back, allowed)

    def test_what_the_budget_does_not_hold_is_refused_with_the_reason(self) -> None:
        for wanted, reason in (((3, 3), "OVER_BUDGET"), ((4, 1), "POOL_SIZE"), ((0, 2), "POOL_SIZE")):
            with pytest.raises(ConfigError) as caught:
                plan(2, 2).check_goal({PREFILL: wanted[0], DECODE: wanted[1]})
            assert caught.value.reason == reason and caught.value.remedy

    def test_a_configuration_outside_its_own_bounds_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="outside 1 to 1"):
            plan(2, 2, prefill_max=1)
        with pytest.raises(ConfigError) as caught:
            plan(2, 2, budget_cpus=3)
        assert caught.value.reason in ("OVER_BUDGET", "POOL_SIZE")

    def test_a_plan_survives_its_way_to_the_controller(self) -> None:
        made = plan(2, 3, costs=(0.5, 2.0), mode="auto", budget_cpus=20)
        assert Plan.from_json(made.to_json()) == made


class TestPressure:
    """By the definitions in ScalingSettings: load over what is set for one worker, averaged over the workers."""

    def test_prefill_is_pressed_by_queued_tokens_or_by_the_wait_for_them(self) -> None:
        meant = ScalingSettings(queued_tokens=1000, wait_s=2.0)
        assert pressure(PREFILL, [Load(queued_tokens=1500), Load(queued_tokens=500)], meant) == 1.0
        slow = Load(queued_tokens=100, prefill_tokens_per_s=10.0)  # ten seconds, where two are meant
        assert pressure(PREFILL, [slow], meant) == 5.0
        assert pressure(PREFILL, [Load(predicted_wait_s=4.0)], meant) == 2.0

    def test_decode_is_pressed_by_pages_or_by_sequences(self) -> None:
        meant = ScalingSettings(page_use=0.5, running=8)
        assert pressure(DECODE, [Load(pages_total=100, pages_held=50)], meant) == 1.0
        assert pressure(DECODE, [Load(running=12), Load(running=4)], meant) == 1.0
        assert pressure(DECODE, [Load(waiting=60)], meant) == 0.0, "they wait for prefill"

    def test_nobody_reports_is_not_nobody_works(self) -> None:
        assert pressure(DECODE, [], ScalingSettings()) is None
        assert pressure(DECODE, [Load()], ScalingSettings()) == 0.0


steady = st.floats(0.0, 12.0)


@settings(max_examples=25)
@given(st.sampled_from(["auto", "ratio"]), steady, steady, st.integers(1, 4), st.integers(1, 4))
def test_every_steady_load_comes_to_rest_within_the_budget(
    mode: str, prompts: float, outputs: float, prefill: int, decode: int
) -> None:
    allowed = plan(prefill, decode, mode=mode)
    cluster = Cluster(allowed, recorded((0.0, prompts)), recorded((0.0, outputs)))
    check_budget(cluster.run(900.0), allowed)
    rest = cluster.run(300.0)
    assert len(sizes(rest)) == 1, sizes(rest)
    check_budget(rest, allowed)
