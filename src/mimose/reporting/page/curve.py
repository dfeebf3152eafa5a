"""The memory of one step over time.

The highest point of the curve equals the peak that the timeline (`mimose.costs`) predicts. Times
are estimates: a forward is assumed to take as long as its recompute; a backward whose time was not
measured, twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mimose.costs import Moments, Option, OptionCost, Profile, RunCost, costs_of, levels

FORWARD, HEAD, RECOMPUTE, BACKWARD, TAIL = "forward", "head", "recompute", "backward", "tail"
GAP = "gap"
"""Between two runs. The page identifies phases by their first letters."""


class Moment(NamedTuple):
    """A point of the curve."""

    phase: str
    run: int
    """Index of the run; -1 in head and tail."""
    seconds: float
    """Since the start of the step."""
    bytes: int
    """On top of the memory in use at the start of the step."""


class _Pen:
    """Appends moments at increasing times."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._seconds = 0.0

    def draw(self, phase: str, run: int, seconds: float, *levels: int) -> None:
        """Append these levels, evenly spaced over the next `seconds`."""
        for level in levels:
            self._seconds += seconds / len(levels)
            self.moments.append(Moment(phase, run, self._seconds, level))


def curve(profile: Profile, choices: Sequence[Option]) -> list[Moment]:
    """The memory of a step in which each run has the option chosen for it."""
    pen, runs = _Pen(), profile.runs
    costs, (starts, _, entries) = costs_of(profile, choices), levels(profile, choices)
    moments = Moments(profile, costs)
    for k, (run, cost, start) in enumerate(zip(runs, costs, starts, strict=True)):
        if run.between_blocks_peak > 0:
            pen.draw(GAP, k, 0.0, start + run.between_blocks_peak)
        pen.draw(FORWARD, k, _seconds(run), start, start + _highest(run, cost))
    pause = _seconds_of_head(profile)
    pen.draw(HEAD, -1, pause, *moments.heads)
    for k in reversed(range(len(runs))):
        if runs[k].fixed:  # its backward is not measured
            pen.draw(BACKWARD, k, 0.0, moments.backwards[k])
        else:
            _draw_backward(pen, k, runs[k], costs[k], entries[k])
    pen.draw(TAIL, -1, pause / 2, profile.tail)
    return pen.moments


def _highest(run: RunCost, cost: OptionCost) -> int:
    """The peak of the run's forward, above its start."""
    kept = not (cost.option.recomputes or run.fixed)
    return run.recompute_peak if kept else run.forward_peak


def _draw_backward(pen: _Pen, k: int, run: RunCost, cost: OptionCost, entry: int) -> None:
    level = entry - cost.backward_held
    if cost.option.recomputes:
        pen.draw(RECOMPUTE, k, _seconds(run), level, level + run.recompute_peak)
    level += run.saved
    if not cost.option.recomputes:
        level -= run.droppable_input
    seconds = run.backward_nanoseconds / 1e9 or 2 * _seconds(run)
    pen.draw(BACKWARD, k, seconds, level, level + run.backward_peak)


def _seconds(run: RunCost) -> float:
    return max(run.nanoseconds, 1) / 1e9


def _seconds_of_head(profile: Profile) -> float:
    """Not measured: half an average run, so that the phase is visible."""
    return sum(map(_seconds, profile.runs)) / max(1, len(profile.runs)) / 2
