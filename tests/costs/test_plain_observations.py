"""Observations in files: older formats are read, and flags remain flags."""

from __future__ import annotations

from typing import Any

from chains import chain, run
from mimose.costs import RunCost, StepObservation

FIXED = RunCost._fields.index("fixed")


def observed(**costs: Any) -> StepObservation:
    first = run(boundary=10, saved=100, nanoseconds=7, **costs)
    return StepObservation(
        pattern=((0, 0), (1, 0)),
        profile=chain(first, run(boundary=20, saved=50)),
        gradients_allocated=(3, 0),
    )


def test_movable_inputs_and_times_of_backwards_are_stored() -> None:
    one = observed(input_movable=True, backward_nanoseconds=11)
    again = StepObservation.from_plain(one.to_plain())
    assert again == one
    assert again.runs[0].input_movable is True


def test_fields_missing_in_format_2_are_unknown() -> None:
    one = observed(input_movable=True, backward_nanoseconds=11)
    plain = one.to_plain()
    plain["runs"] = [costs[: FIXED + 1] for costs in plain["runs"]]
    older = StepObservation.from_plain({**plain, "format": 2})
    assert older == observed()


def test_a_joined_input_is_movable_only_if_both_are() -> None:
    movable, held = observed(input_movable=True), observed(input_movable=False)
    assert movable.joined(movable).runs[0].input_movable
    assert not movable.joined(held).runs[0].input_movable
    assert not held.joined(movable).runs[0].input_movable


def test_no_input_is_movable_if_blocks_run_in_any_order() -> None:
    one = observed(input_movable=True)
    assert not any(each.input_movable for each in one.in_any_order().runs)


def test_both_times_are_taken_from_a_timed_observation() -> None:
    timed = observed(backward_nanoseconds=11).timed_as(observed(backward_nanoseconds=13))
    assert timed.runs[0].backward_nanoseconds == 13
