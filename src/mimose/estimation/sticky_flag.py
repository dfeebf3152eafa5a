"""A flag that stays set for a while."""

from __future__ import annotations

_LASTS = 256
"""Steps without the behaviour after which the flag is cleared."""


class StickyFlag:
    """Whether steps show some behaviour: set by one step, cleared after many steps without it."""

    def __init__(self) -> None:
        self.is_set = False
        self._steps_left = 0

    def note(self, shown: bool) -> bool:
        """A step showed the behaviour or not. Returns whether the flag had predicted that."""
        expected = self.is_set == shown
        self._steps_left = _LASTS if shown else max(0, self._steps_left - 1)
        self.is_set = self._steps_left > 0
        return expected
