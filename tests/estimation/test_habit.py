"""What a step has done, others are expected to do, until they long have not."""

from __future__ import annotations

from mimose.estimation.habit import Habit


def test_what_was_done_once_is_expected_until_it_long_was_not() -> None:
    habit = Habit()
    assert habit.note(False)
    assert not habit
    assert not habit.note(True)
    for _ in range(255):
        assert habit
        assert not habit.note(False)
    assert habit
    assert not habit.note(False)
    assert not habit
    assert habit.note(False)
