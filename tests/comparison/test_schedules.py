"""A schedule costs what its operations cost; impossible ones are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chains
from chains import chain, run, steady
from mimose.comparison.evaluation import evaluate
from mimose.comparison.schedules import (
    Backward,
    Drop,
    Forward,
    Item,
    Move,
    Operation,
    Recompute,
    ScheduleError,
    schedule_of,
)
from mimose.costs.timeline import Profile, extra_nanoseconds, peak

PROFILES = st.one_of(chains.realistic_chains(9, 150), chains.odd_chains(8, 6))


@settings(steady, max_examples=250)
@given(PROFILES, st.data())
def test_schedule_of_a_plan_has_exactly_the_peak_and_time_of_the_plan(
    profile: Profile, data: st.DataObject
) -> None:
    choices = [data.draw(st.sampled_from([cost.option for cost in r.menu])) for r in profile.runs]
    cost = evaluate(profile, schedule_of(profile, choices))
    assert cost.peak_bytes == peak(profile, choices)
    assert cost.extra_nanoseconds == extra_nanoseconds(profile, choices)


TWO = chain(
    run(boundary=10, forward_peak=20, recompute_peak=40, saved=30, nanoseconds=3),
    run(boundary=15, forward_peak=20, recompute_peak=40, saved=30, nanoseconds=5),
    head_forward=25,
    head_backward=25,
)
SEGMENT: tuple[Operation, ...] = (
    Forward(0, keep=False),
    Forward(1, keep=False),
    Drop(Item.INPUT, 1),
    Recompute(0, keep=True),
    Recompute(1, keep=True),
    Backward(1),
    Backward(0),
)


def test_segment_is_recomputed_from_its_first_input_alone() -> None:
    cost = evaluate(TWO, SEGMENT)
    # The second recompute: both inputs, the first run's activations, the recompute itself.
    assert cost.peak_bytes == 10 + 15 + 30 + 40
    assert cost.extra_nanoseconds == 8


def test_dropped_input_leaves_room_in_the_head() -> None:
    profile = chain(run(boundary=10), run(boundary=15), head_forward=125, head_backward=100)
    assert evaluate(profile, SEGMENT).peak_bytes == 110


def test_moved_activations_leave_room_until_they_are_back() -> None:
    profile = chain(run(saved=50), run(forward_peak=70, saved=1), head_backward=60)
    schedule: list[Operation] = [
        Forward(0, keep=True),
        Move(Item.ACTIVATIONS, 0, to_device=False),
        Forward(1, keep=False),
        Recompute(1, keep=True),
        Backward(1),
        Move(Item.ACTIVATIONS, 0, to_device=True),
        Backward(0),
    ]
    cost = evaluate(profile, tuple(schedule))
    assert (cost.peak_bytes, cost.moved_bytes) == (70, 50)
    schedule[4:6] = schedule[5:3:-1]
    assert evaluate(profile, tuple(schedule)).peak_bytes == 70
    del schedule[1], schedule[3]
    assert evaluate(profile, tuple(schedule)).peak_bytes == 120


FIXED = chain(run(fixed=True), run(), run())
AHEAD: list[Operation] = [Forward(k, keep=True) for k in range(3)]
IMPOSSIBLE: dict[str, tuple[Profile, list[Operation], str]] = {
    "forward out of order": (TWO, [Forward(1, keep=True)], "next forward is that of run 0"),
    "forward without its input": (
        TWO,
        [Forward(0, keep=True), Drop(Item.INPUT, 1), Forward(1, keep=True)],
        "the input of run 1 is not there",
    ),
    "backward without activations": (
        TWO,
        [Forward(0, keep=True), Forward(1, keep=False), Backward(1)],
        "the activations of run 1 are not there",
    ),
    "backward of what is on the host": (
        TWO,
        [*AHEAD[:2], Move(Item.ACTIVATIONS, 1, to_device=False), Backward(1)],
        "the activations of run 1 are on the host",
    ),
    "backward out of order": (TWO, [*AHEAD[:2], Backward(0)], "next backward is that of run 1"),
    "backward before the forwards are over": (TWO, [AHEAD[0], Backward(0)], "forward of run 1"),
    "recompute without its input": (
        TWO,
        [Forward(0, keep=True), Forward(1, keep=False), Drop(Item.INPUT, 1), Recompute(1, True)],
        "the input of run 1 is not there",
    ),
    "recompute before its forward": (TWO, [Recompute(0, keep=True)], "no forward yet"),
    "recompute of what is there": (TWO, [AHEAD[0], Recompute(0, True)], "are there already"),
    "recompute of a fixed run": (FIXED, [AHEAD[0], Recompute(0, False)], "cannot be recomputed"),
    "fixed run that is not kept": (FIXED, [Forward(0, keep=False)], "must be kept"),
    "drop of a fixed run": (FIXED, [AHEAD[0], Drop(Item.ACTIVATIONS, 0)], "must stay"),
    "drop behind a fixed run": (FIXED, [AHEAD[0], Drop(Item.INPUT, 1)], "must stay"),
    "drop of nothing": (TWO, [Drop(Item.INPUT, 1)], "not there"),
    "return of what never left": (TWO, [Move(Item.INPUT, 0, to_device=True)], "not on the host"),
    "unknown run": (TWO, [Forward(2, keep=True)], "there are 2 runs"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_schedule_is_refused_with_the_operation(case: str) -> None:
    profile, schedule, problem = IMPOSSIBLE[case]
    with pytest.raises(ScheduleError) as error:
        evaluate(profile, tuple(schedule))
    if case != "forward out of order":
        assert f"operation {len(schedule) - 1}, {schedule[-1]}" in str(error.value)
    assert problem in str(error.value)


def test_schedule_that_ends_too_early_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the backward of run 1 is missing"):
        evaluate(TWO, (Forward(0, keep=True), Forward(1, keep=True)))
