"""How long a run takes to recompute, at any size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mimose.costs import StepObservation

Floats = npt.NDArray[np.float64]

_EVEN, _MUCH = 0.02, 1.3
"""How far the times of runs may move, each against the others and all together, before plans are
made anew."""


@dataclass(frozen=True, slots=True)
class Times:
    """Recompute time as a line in the bytes that a run saves."""

    base: Floats
    slope: Floats
    lines: tuple[list[float], list[float]]
    """Both as plain numbers."""

    @classmethod
    def of(cls, observations: Sequence[StepObservation]) -> Times:
        saved = np.array([[run.saved_bytes for run in o.runs] for o in observations], float)
        seconds = np.array([[run.seconds for run in o.runs] for o in observations])
        deviation = saved - saved.mean(0)
        spread = (deviation**2).sum(0)
        rise = (deviation * (seconds - seconds.mean(0))).sum(0)
        slope = np.maximum(np.divide(rise, spread, out=np.zeros_like(rise), where=spread > 0), 0)
        base = np.maximum(seconds.mean(0) - slope * saved.mean(0), 0)
        return cls(base, slope, (base.tolist(), slope.tolist()))

    def at(self, saved: Floats) -> Floats:
        return self.base + self.slope * saved

    def much_like(self, other: Times, saved: Floats) -> bool:
        """Whether these are about the same, and for all runs in the same proportion.

        Then what was the least time to recompute by the one still is by the other.
        """
        ours, theirs = self.at(saved), other.at(saved)
        if not (ours > 0).all() or not (theirs > 0).all():
            return False
        scale = ours.sum() / theirs.sum()
        even = np.abs(ours / (scale * theirs) - 1).max() <= _EVEN
        return bool(even) and 1 / _MUCH <= scale <= _MUCH


def with_shared_times(observation: StepObservation) -> StepObservation:
    """The same, with the median time for all runs that save the same: copies of one block."""
    groups: dict[int, list[int]] = {}
    for k, run in enumerate(observation.runs):
        near = (at for at in groups if abs(at - run.saved_bytes) <= 0.005 * at)
        groups.setdefault(next(near, run.saved_bytes), []).append(k)
    runs = list(observation.runs)
    for members in groups.values():
        median = statistics.median(runs[k].seconds for k in members)
        for k in members:
            runs[k] = replace(runs[k], seconds=median)
    return replace(observation, runs=tuple(runs))
