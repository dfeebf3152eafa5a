"""The default planner with a link: close to brute force, and never worse than without one."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chains
from chains import SIZE, run, steady
from mimose.costs import Link, Option, Profile, StepConditions, peak
from mimose.planning import KeepAll, Optimal, Plan, RecomputeAll, strictest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from transfers_quality import SHARES, different_blocks, equal_layers

KEEP, HOST, AGAIN, FROM_HOST = Option
GIB = 1 << 30


def every_plan(profile: Profile) -> list[Plan]:
    """Every possible plan."""
    options = [[KEEP] if r.fixed else list(Option) for r in profile.runs]
    return [Plan.of(profile, choices, 1 << 60) for choices in itertools.product(*options)]


def step_seconds(profile: Profile) -> float:
    times = (r.nanoseconds + (r.backward_nanoseconds or r.nanoseconds) for r in profile.runs)
    return sum(times) / 1e9


def budgets(profile: Profile) -> list[int]:
    least, most = (planner.plan(profile, 0).peak_bytes for planner in (RecomputeAll(), KeepAll()))
    lowest = peak(profile, [FROM_HOST] * len(profile.runs))
    return [lowest, *(int(least + share * (most - least)) for share in SHARES)]


def assert_near_brute_force(profile: Profile) -> None:
    plans = [plan for plan in every_plan(profile) if plan.fits]
    for available in budgets(profile):
        times = [plan.extra_seconds for plan in plans if plan.peak_bytes <= available]
        plan = Optimal().plan(profile, available)
        assert plan.fits == bool(times)
        if times:
            whole = step_seconds(profile)
            assert whole + plan.extra_seconds <= 1.02 * (whole + min(times))


@pytest.mark.parametrize("seed", range(10))
def test_equal_layers_are_planned_within_two_percent_of_brute_force(seed: int) -> None:
    assert_near_brute_force(equal_layers(5, random.Random(seed)))


@pytest.mark.parametrize("seed", range(10))
def test_different_blocks_are_planned_within_two_percent_of_brute_force(seed: int) -> None:
    assert_near_brute_force(different_blocks(5, random.Random(seed)))


def test_eight_equal_layers_are_planned_within_two_percent_of_brute_force() -> None:
    assert_near_brute_force(equal_layers(8, random.Random(0)))


def some_budget(data: st.DataObject, profile: Profile) -> int:
    choices = [data.draw(st.sampled_from(Option)) for _ in profile.runs]
    return peak(profile, choices) - data.draw(st.integers(0, 1))


@settings(steady, max_examples=150)
@given(chains.chains_with_link(), st.data())
def test_a_link_never_makes_a_plan_slower_or_larger(profile: Profile, data: st.DataObject) -> None:
    available = some_budget(data, profile)
    without = Optimal().plan(replace(profile, link=None), available)
    plan = Optimal().plan(profile, available)
    assert plan.fits >= without.fits
    assert plan.fits == (plan.peak_bytes <= available)
    if without.fits:
        assert plan.extra_seconds <= without.extra_seconds
    else:
        assert plan.peak_bytes <= without.peak_bytes


@settings(steady, max_examples=100)
@given(chains.chains_with_link(), st.data())
def test_transfers_stay_within_host_memory(profile: Profile, data: st.DataObject) -> None:
    assert profile.link is not None
    host = data.draw(st.integers(0, 400))
    profile = replace(profile, link=profile.link._replace(host_bytes=host))
    plan = Optimal().plan(profile, some_budget(data, profile))
    assert plan.host_bytes <= host


@settings(steady, max_examples=100)
@given(chains.chains_with_link(), st.data())
def test_a_slow_link_does_not_change_the_plan(profile: Profile, data: st.DataObject) -> None:
    available = some_budget(data, profile)
    without = Optimal().plan(replace(profile, link=None), available)
    slow = replace(profile, link=Link(1e-6, 1e-6, 1 << 40))
    if without.fits:
        assert Optimal().plan(slow, available) == without


@steady
@given(chains.chains_with_link())
def test_nothing_moves_where_everything_can_be_kept(profile: Profile) -> None:
    plan = Optimal().plan(profile, peak(profile, [KEEP] * len(profile.runs)))
    assert plan.keeps_all
    assert not plan.transfers


@settings(steady, max_examples=100)
@given(chains.chains_with_link(), st.data())
def test_only_allowed_options_are_chosen(profile: Profile, data: st.DataObject) -> None:
    assert profile.link is not None
    allowed = frozenset({KEEP, *data.draw(st.sets(st.sampled_from(Option)))})
    profile = replace(profile, link=profile.link._replace(options=allowed))
    plan = Optimal().plan(profile, some_budget(data, profile))
    assert set(plan.choices) <= allowed | {AGAIN}  # recomputing is the last resort


@steady
@given(chains.chains_with_link(), st.data())
def test_nothing_moves_if_backwards_keep_their_graph(profile: Profile, data: st.DataObject) -> None:
    retained = profile.in_step(StepConditions(retained=True))
    assert not Optimal().plan(retained, some_budget(data, retained)).transfers


@settings(steady, max_examples=150)
@given(chains.chains_with_link(), st.data())
def test_strictest_plan_needs_no_more_than_recomputing_all(
    profile: Profile, data: st.DataObject
) -> None:
    available = some_budget(data, profile)
    again = RecomputeAll().plan(profile, available)
    plan = strictest(profile, available)
    assert plan.peak_bytes <= again.peak_bytes
    assert plan.recomputed == again.recomputed
    if again.fits:
        assert plan == again
    if peak(profile, [FROM_HOST] * len(profile.runs)) <= available:
        assert plan.fits
        assert Optimal().plan(profile, available).fits


def test_strictest_plan_moves_as_few_inputs_as_fit() -> None:
    layer = run(boundary=100, nanoseconds=10, input_movable=True)
    profile = Profile(SIZE, (layer,) * 8, 800, 800, link=Link(100, 100, 1 << 40))
    assert str(strictest(profile, 800)) == "rrrrrrrr"
    assert str(strictest(profile, 700)) == "hrrrrrrr"
    assert str(strictest(profile, 550)) == "hhhrrrrr"
    full = replace(profile, link=Link(100, 100, 200))
    assert str(strictest(full, 550)) == "hhrrrrrr"


# Sixteen layers of a language model, 16,384 tokens, and a link of 55 GB/s


def sixteen_layers(link: Link | None = Link(55, 55, 1 << 60)) -> Profile:  # noqa: B008
    layer = run(
        boundary=GIB // 8,
        forward_peak=3 * GIB // 10,
        backward_entry=GIB // 8,
        saved=28 * GIB // 10,
        recompute_peak=31 * GIB // 10,
        backward_peak=8 * GIB // 10,
        nanoseconds=17_000_000,
        input_movable=True,
        backward_nanoseconds=32_000_000,
    )
    return Profile(SIZE, (layer,) * 16, 6 * GIB, 6 * GIB, link=link)


def available_for(share: float) -> int:
    """Room for this share of all activations, and for the head."""
    return int(4 * GIB + share * 16 * (2.8 + 0.125) * GIB)


def test_a_few_layers_move_without_extra_time() -> None:
    plan = Optimal().plan(sixteen_layers(), available_for(0.85))
    assert str(plan) == "HKKKHKKKHKKKKKKK"
    assert plan.extra_seconds == plan.stall_seconds == 0


@pytest.mark.parametrize("share", [0.76, 0.5, 0.24])
def test_four_layers_less_are_recomputed_thanks_to_the_link(share: float) -> None:
    plan = Optimal().plan(sixteen_layers(), available_for(share))
    without = Optimal().plan(sixteen_layers(None), available_for(share))
    assert plan.fits
    assert plan.recomputed == without.recomputed - 4
    assert plan.stall_seconds < 0.001


def test_inputs_on_the_host_meet_budgets_that_recomputing_all_does_not() -> None:
    least = RecomputeAll().plan(sixteen_layers(), 0).peak_bytes
    plan = Optimal().plan(sixteen_layers(), least - GIB // 2)
    assert plan.fits
    assert FROM_HOST in plan.choices
    assert not Optimal().plan(sixteen_layers(None), least - GIB // 2).fits
