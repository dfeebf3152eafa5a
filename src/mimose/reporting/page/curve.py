"""The memory of one step over time.

The highest point of the curve equals the peak that the timeline (`mimose.costs`) predicts. Times
are estimates: a forward is assumed to take as long as its recompute; a backward whose time was not
measured, twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mimose.costs import Moments, Option, OptionCost, Profile, RunCost, costs_of

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


class _Curve:
    """Appends moments at increasing times."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._seconds = 0.0

    def add(self, phase: str, run: int, seconds: float, *levels: int) -> None:
        """Append these levels, evenly spaced over the next `seconds`."""
        for level in levels:
            self._seconds += seconds / len(levels)
            self.moments.append(Moment(phase, run, self._seconds, level))


def curve(profile: Profile, choices: Sequence[Option]) -> list[Moment]:
    """The memory of a step in which each run has the option chosen for it."""
    drawn, runs = _Curve(), profile.runs
    costs = costs_of(profile, choices)
    moments = Moments(profile, costs)
    starts, _, entries = moments.levels()
    for k, (run, cost, start) in enumerate(zip(runs, costs, starts, strict=True)):
        if run.between_blocks_peak > 0:
            drawn.add(GAP, k, 0.0, start + run.between_blocks_peak)
        drawn.add(FORWARD, k, _seconds(run), start, start + _highest(run, cost))
    head_seconds = _head_seconds(profile)
    drawn.add(HEAD, -1, head_seconds, *moments.heads)
    for k in reversed(range(len(runs))):
        if runs[k].fixed:  # its backward is not measured
            drawn.add(BACKWARD, k, 0.0, moments.backwards[k])
        else:
            _add_backward(drawn, k, runs[k], costs[k], entries[k])
    drawn.add(TAIL, -1, head_seconds / 2, profile.tail)
    return drawn.moments


def _highest(run: RunCost, cost: OptionCost) -> int:
    """The peak of the run's forward, above its start."""
    kept = not (cost.option.recomputes or run.fixed)
    return run.recompute_peak if kept else run.forward_peak


def _add_backward(drawn: _Curve, k: int, run: RunCost, cost: OptionCost, entry: int) -> None:
    level = entry - cost.backward_held
    if cost.option.recomputes:
        drawn.add(RECOMPUTE, k, _seconds(run), level, level + run.recompute_peak)
    level += run.saved
    if not cost.option.recomputes:
        level -= run.droppable_input
    seconds = run.backward_nanoseconds / 1e9 or 2 * _seconds(run)
    drawn.add(BACKWARD, k, seconds, level, level + run.backward_peak)


def _seconds(run: RunCost) -> float:
    return max(run.nanoseconds, 1) / 1e9


def _head_seconds(profile: Profile) -> float:
    """Not measured: half an average run, so that the phase is visible."""
    return sum(map(_seconds, profile.runs)) / max(1, len(profile.runs)) / 2
