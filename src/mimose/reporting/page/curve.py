"""The memory of one step as a curve: every level and peak of the timeline, in the order of time.

The timeline (`mimose.costs`) says how high a step rises; this says when. The highest point of a
curve is the timeline's peak, exactly. Times are estimates: a forward is taken to last as long as
its recompute, a backward twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mimose.costs import Profile, RunCost

FORWARD, HEAD, AGAIN, BACKWARD, TAIL = "forward", "head", "recompute", "backward", "tail"
GAP = "gap"
"""Between two runs. The page knows phases by their first letters."""


class Moment(NamedTuple):
    """A point of the curve."""

    phase: str
    run: int
    """Which run is at work; -1 in head and tail."""
    seconds: float
    """Since the step's start."""
    bytes: int
    """Above the step's start."""


class _Pen:
    """Draws moments one after another."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._seconds = 0.0

    def draw(self, phase: str, run: int, seconds: float, *levels: int) -> None:
        """These levels, evenly spread over a stretch of so many seconds."""
        for level in levels:
            self._seconds += seconds / len(levels)
            self.moments.append(Moment(phase, run, self._seconds, level))


def curve(profile: Profile, recompute: Sequence[bool]) -> list[Moment]:
    """The memory of a step in which these runs are recomputed and the others kept."""
    pen = _Pen()
    kept, before = 0, []
    for k, (run, again) in enumerate(zip(profile.runs, recompute, strict=True)):
        before.append(kept)
        again = again or run.fixed
        highest = run.forward if again else run.start + run.spike
        if run.gap > run.start:
            pen.draw(GAP, k, 0.0, kept + run.gap)
        pen.draw(FORWARD, k, _seconds(run), kept + run.start, kept + highest)
        kept += 0 if again else run.growth
    pause = _seconds_of_head(profile)
    pen.draw(HEAD, -1, pause, kept + profile.head_forward, kept + profile.head_backward)
    for k in reversed(range(len(profile.runs))):
        _draw_backward(pen, k, profile.runs[k], recompute[k], before[k])
    pen.draw(TAIL, -1, pause / 2, profile.tail)
    return pen.moments


def _draw_backward(pen: _Pen, k: int, run: RunCost, again: bool, kept: int) -> None:
    if run.fixed:  # it was never looked at in its backward
        return
    if again:
        entry = kept + run.entry
        pen.draw(AGAIN, k, _seconds(run), entry, entry + run.spike)
    else:
        entry = kept + run.entry - run.in_idle
    level = entry + run.saved
    pen.draw(BACKWARD, k, 2 * _seconds(run), level, level + run.back)


def _seconds(run: RunCost) -> float:
    return max(run.nanoseconds, 1) / 1e9


def _seconds_of_head(profile: Profile) -> float:
    """Nobody measures it: half an average run, so that it can be seen."""
    return sum(map(_seconds, profile.runs)) / max(1, len(profile.runs)) / 2
