"""How long steps take, from one's first block to the next one's, without pauses in between."""

from __future__ import annotations

_PAUSE = 4
"""Times what is usual between steps that count at most: the rest is an evaluation, a checkpoint, a
person thinking."""
_SHARE = 8
"""The part of what is usual that each step replaces."""


class Pace:
    """Takes one step after another; of a long stretch between two only what is usual counts.

    What comes after the backward belongs to a step: the optimizer's step, and on a GPU the wait for
    what the host has only launched.
    """

    def __init__(self) -> None:
        self._usual: float | None = None

    def seconds(self, inside: float, from_start_to_start: float) -> float:
        """What counts of a step: from its first block to the end of its backward, and then."""
        if self._usual is None:
            self._usual = inside
        between = min(max(0.0, from_start_to_start - inside), _PAUSE * self._usual)
        self._usual += (between - self._usual) / _SHARE
        return inside + between
