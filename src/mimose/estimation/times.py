"""Predict the time of a run's recompute and of its backward at any size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.costs import RunCost, StepObservation


@dataclass(frozen=True, slots=True)
class Times:
    """Times in nanoseconds, as a linear function of the bytes that the run saves."""

    recompute: _Lines
    backward: _Lines

    @classmethod
    def of(cls, observations: Sequence[StepObservation]) -> Times:
        return cls(
            _Lines.of(observations, lambda run: run.nanoseconds),
            _Lines.of(observations, lambda run: run.backward_nanoseconds),
        )


@dataclass(frozen=True, slots=True)
class _Lines:
    """A line fitted for each run: base + slope × saved bytes."""

    base: list[float]
    slope: list[float]

    @classmethod
    def of(
        cls, observations: Sequence[StepObservation], time_of: Callable[[RunCost], int]
    ) -> _Lines:
        saved = np.array([[run.saved for run in o.runs] for o in observations], float)
        times = np.array([[time_of(run) for run in o.runs] for o in observations], float)
        deviation = saved - saved.mean(0)
        spread = (deviation**2).sum(0)
        rise = (deviation * (times - times.mean(0))).sum(0)
        slope = np.maximum(np.divide(rise, spread, out=np.zeros_like(rise), where=spread > 0), 0)
        base = np.maximum(times.mean(0) - slope * saved.mean(0), 0)
        return cls(base.tolist(), slope.tolist())

    def nanoseconds(self, run: int, saved_bytes: int) -> int:
        """The time of a run that saves this many bytes."""
        return round(self.base[run] + self.slope[run] * saved_bytes)


def with_shared_times(observation: StepObservation) -> StepObservation:
    """A copy in which similar runs (saved bytes within 0.5 %) have the median of their times."""
    groups: dict[int, list[int]] = {}
    for k, run in enumerate(observation.runs):
        similar = (saved for saved in groups if abs(saved - run.saved) <= 0.005 * saved)
        groups.setdefault(next(similar, run.saved), []).append(k)
    runs = list(observation.runs)
    for members in groups.values():
        median = round(statistics.median(runs[k].nanoseconds for k in members))
        backward = round(statistics.median(runs[k].backward_nanoseconds for k in members))
        for k in members:
            runs[k] = runs[k]._replace(nanoseconds=median, backward_nanoseconds=backward)
    return observation.with_runs(runs)
