"""A flag is set by one step, and cleared after many steps without the behaviour."""

from __future__ import annotations

from mimose.estimation.sticky_flag import StickyFlag


def test_a_flag_stays_set_for_256_steps_without_the_behaviour() -> None:
    flag = StickyFlag()
    assert flag.note(False)
    assert not flag.is_set
    assert not flag.note(True)
    for _ in range(255):
        assert flag.is_set
        assert not flag.note(False)
    assert flag.is_set
    assert not flag.note(False)
    assert not flag.is_set
    assert flag.note(False)
