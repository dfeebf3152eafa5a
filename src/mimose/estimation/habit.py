"""What steps do now and then."""

from __future__ import annotations

_LONG = 256
"""Steps without it after which a habit is given up."""


class Habit:
    """Something that a step did, and that others are taken to do until they long have not."""

    def __init__(self) -> None:
        self._left = 0

    def __bool__(self) -> bool:
        return self._left > 0

    def note(self, done: bool) -> bool:
        """A step did it, or did not; whether that was expected."""
        expected = bool(self) == done
        self._left = _LONG if done else max(0, self._left - 1)
        return expected
