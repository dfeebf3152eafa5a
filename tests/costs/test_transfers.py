"""When bytes are released and fetched: computed by hand, and by simulating a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chains
from chains import chain, run, steady
from mimose.costs import (
    Link,
    Option,
    Profile,
    StepConditions,
    Transfer,
    costs_of,
    extra_nanoseconds,
    levels,
    peak,
    transfers_of,
)
from mimose.planning import Plan

KEEP, HOST, AGAIN, FROM_HOST = Option
FAST = Link(1.1, 1.1, 1 << 40)
"""A link on which one byte takes one nanosecond, including the margin."""


def of_equal_runs(count: int, link: Link | None = FAST, **costs: Any) -> Profile:
    """Runs that take 10 ns, and save 100 bytes of an input of 20."""
    usual: dict[str, Any] = {
        "boundary": 20,
        "saved": 100,
        "nanoseconds": 10,
        "input_movable": True,
    }
    profile = chain(*[run(**{**usual, **costs})] * count)
    return replace(profile, link=link)


def moved(profile: Profile, letters: str) -> tuple[Transfer, ...]:
    return Plan.of(profile, Option.of_letters(letters), 1 << 40).transfers


def test_bytes_leave_before_the_first_forward_that_starts_after_their_copy() -> None:
    # The forward ends at 10 and the copy at 30, when the fourth run starts.
    (transfer,) = moved(of_equal_runs(8, saved=20), "HKKKKKKK")
    assert transfer.release_before == 3
    (transfer,) = moved(of_equal_runs(8, saved=21), "HKKKKKKK")
    assert transfer.release_before == 4


def test_a_copy_waits_for_the_one_before() -> None:
    first, second = moved(of_equal_runs(8, saved=25), "HHKKKKKK")
    assert (first.release_before, second.release_before) == (4, 6)


def test_bytes_are_fetched_at_the_last_backward_that_is_early_enough() -> None:
    # The backward comes to the first run at 70. A copy of 20 ns begins at 50, with the third run's.
    (transfer,) = moved(of_equal_runs(8, saved=20), "HKKKKKKK")
    assert transfer.prefetch_at == 2
    (transfer,) = moved(of_equal_runs(8, saved=21), "HKKKKKKK")
    assert transfer.prefetch_at == 3


def test_recomputes_and_long_backwards_give_copies_more_time() -> None:
    (transfer,) = moved(of_equal_runs(8, saved=20), "Hrrrrrrr")
    assert transfer.prefetch_at == 1
    (transfer,) = moved(of_equal_runs(8, saved=20, backward_nanoseconds=30), "HKKKKKKK")
    assert transfer.prefetch_at == 1


def test_a_copy_back_is_over_before_the_next_one_is_due() -> None:
    # The second run's copy has to be over at 45, when the first one's begins.
    first, second = moved(of_equal_runs(8, saved=25), "HHKKKKKK")
    assert (first.prefetch_at, second.prefetch_at) == (3, 5)


def test_the_device_waits_after_the_last_forward_for_copies_to_the_host() -> None:
    profile = of_equal_runs(4, link=Link(1.1, 1e9, 1 << 40))
    plan = Plan.of(profile, Option.of_letters("HKKK"), 1 << 40)
    assert plan.transfers[0].release_before == 4
    assert plan.stall_seconds == plan.extra_seconds == pytest.approx((10 + 100 - 40) / 1e9)


def test_the_backward_waits_for_copies_that_begin_with_it() -> None:
    profile = of_equal_runs(4, link=Link(1e9, 1.1, 1 << 40))
    plan = Plan.of(profile, Option.of_letters("HKKK"), 1 << 40)
    assert plan.transfers[0].prefetch_at == 3
    assert plan.stall_seconds == plan.extra_seconds == pytest.approx((100 - 30) / 1e9)


def test_stalls_add_to_recomputes() -> None:
    plan = Plan.of(of_equal_runs(4), Option.of_letters("HrKK"), 1 << 40)
    assert plan.extra_seconds == pytest.approx(plan.stall_seconds + 10 / 1e9)
    assert plan.recomputed == 1


def test_activations_on_the_host_are_gone_between_release_and_prefetch() -> None:
    profile = of_equal_runs(8, saved=20, boundary=0, link=FAST)
    forward, head, backward = levels(profile, Option.of_letters("HKKKKKKK"))
    assert forward == [0, 20, 40, 40, 60, 80, 100, 120]
    assert head == 140
    assert backward == [20, 40, 60, 60, 80, 100, 120, 140]


def test_input_on_the_host_is_gone_between_release_and_prefetch() -> None:
    profile = of_equal_runs(8)
    forward, head, backward = levels(profile, Option.of_letters("hrrrrrrr"))
    assert forward == [20, 40, 60, 60, 80, 100, 120, 140]
    assert head == 140
    assert backward == [20, 40, 40, 60, 80, 100, 120, 140]


def test_peaks_of_a_moved_run_are_those_of_its_option_without_the_host() -> None:
    profile = of_equal_runs(3, recompute_peak=130, forward_peak=70, backward_peak=40)
    for moving, staying in ((HOST, KEEP), (FROM_HOST, AGAIN)):
        (cost, *_), (same, *_) = (costs_of(profile, [o, KEEP, KEEP]) for o in (moving, staying))
        assert cost[1:3] == same[1:3]


def test_host_memory_holds_all_moved_bytes_at_once() -> None:
    plan = Plan.of(of_equal_runs(8), Option.of_letters("HhKrKKKK"), 1 << 40)
    assert [transfer.moved_bytes for transfer in plan.transfers] == [100, 20]
    assert plan.moved_bytes == plan.host_bytes == 120


def test_a_plan_that_needs_more_host_memory_than_there_is_does_not_fit() -> None:
    profile = of_equal_runs(8, link=FAST._replace(host_bytes=100))
    assert Plan.of(profile, Option.of_letters("HKKKKKKK"), 1 << 40).fits
    assert not Plan.of(profile, Option.of_letters("HHKKKKKK"), 1 << 40).fits


CANNOT = {
    "fixed": (of_equal_runs(3, fixed=True), "HhK", "KKK"),
    "nothing saved": (of_equal_runs(3, saved=0), "HHK", "KKK"),
    "held elsewhere": (of_equal_runs(3, input_movable=False), "hhr", "rrr"),
    "no input": (of_equal_runs(3, boundary=0), "hhr", "rrr"),
    "output of a kept run": (of_equal_runs(4, output_saved=10), "KhhK", "KrhK"),
    "last run": (of_equal_runs(3), "KKH", "KKK"),
    "last input": (of_equal_runs(3), "KKh", "KKr"),
    "no link": (of_equal_runs(3, link=None), "HhK", "rrK"),
    "option not allowed": (
        of_equal_runs(3, link=FAST._replace(options=frozenset({KEEP, AGAIN, HOST}))),
        "HhK",
        "HrK",
    ),
    "retained graph": (of_equal_runs(3).in_step(StepConditions(retained=True)), "HhK", "rrK"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_bytes_that_cannot_be_moved_stay_on_the_device(case: str) -> None:
    profile, asked, done = CANNOT[case]
    plan = Plan.of(profile, Option.of_letters(asked), 1 << 40)
    assert str(plan) == done
    assert plan.peak_bytes == peak(profile, Option.of_letters(done))


def test_link_is_kept_in_a_step_that_allocates_gradients() -> None:
    assert of_equal_runs(2).in_step(StepConditions((5, 0), 5)).link == FAST


# A step, simulated in time


def played(profile: Profile, choices: list[Option]) -> tuple[int, int]:
    """Nanoseconds that the device waits in the forwards and backwards, simulated event by event."""
    costs, link = costs_of(profile, choices), profile.link
    assert link is not None
    transfers = {transfer.run: transfer for transfer in transfers_of(profile, costs).transfers}
    now = free = waited = 0
    done: dict[int, int] = {}
    for k, each in enumerate(profile.runs):
        for j, transfer in transfers.items():
            if transfer.release_before == k:
                assert done[j] <= now, "a forward waits"
        now += each.nanoseconds
        if k in transfers:
            free = done[k] = max(free, now) + int(transfers[k].moved_bytes * 1.1 / link.to_host)
    waited = max(0, max(done.values(), default=0) - now)
    now = free = in_backward = 0
    for k in reversed(range(len(profile.runs))):
        for j in sorted(transfers, reverse=True):
            if transfers[j].prefetch_at == k:
                took = int(transfers[j].moved_bytes * 1.1 / link.from_host)
                free = done[j] = max(free, now) + took
        if k in transfers:
            in_backward += max(0, done[k] - now)
            now = max(now, done[k])
        each = profile.runs[k]
        now += (each.backward_nanoseconds or each.nanoseconds) + costs[k].nanoseconds
    return waited, in_backward


@settings(steady, max_examples=400)
@given(chains.chains_with_link(), st.data())
def test_stalls_equal_those_of_a_simulated_step(profile: Profile, data: st.DataObject) -> None:
    choices = [data.draw(st.sampled_from(Option)) for _ in profile.runs]
    recompute = sum(cost.nanoseconds for cost in costs_of(profile, choices))
    assert extra_nanoseconds(profile, choices) - recompute == sum(played(profile, choices))


@settings(steady, max_examples=200)
@given(chains.chains_with_link(), st.data())
def test_a_plan_agrees_with_the_timeline(profile: Profile, data: st.DataObject) -> None:
    choices = [data.draw(st.sampled_from(Option)) for _ in profile.runs]
    plan = Plan.of(profile, choices, 1 << 40)
    assert plan.peak_bytes == peak(profile, choices) == peak(profile, plan.choices)
    assert plan.extra_seconds == extra_nanoseconds(profile, choices) / 1e9
    assert plan.transfers == transfers_of(profile, costs_of(profile, plan.choices)).transfers
    for each in plan.transfers:
        assert each.run < each.release_before <= len(profile.runs)
        assert each.run <= each.prefetch_at < len(profile.runs)
