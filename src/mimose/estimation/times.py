"""How long a run's recompute and its backward take, at any size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.costs import RunCost, StepObservation


@dataclass(frozen=True, slots=True)
class Times:
    """Times in nanoseconds, for each run a line in the bytes that it saves."""

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
    """A line for each run."""

    base: list[float]
    slope: list[float]

    @classmethod
    def of(
        cls, observations: Sequence[StepObservation], time_of: Callable[[RunCost], int]
    ) -> _Lines:
        saved = np.array([[run.saved for run in o.runs] for o in observations], float)
        took = np.array([[time_of(run) for run in o.runs] for o in observations], float)
        deviation = saved - saved.mean(0)
        spread = (deviation**2).sum(0)
        rise = (deviation * (took - took.mean(0))).sum(0)
        slope = np.maximum(np.divide(rise, spread, out=np.zeros_like(rise), where=spread > 0), 0)
        base = np.maximum(took.mean(0) - slope * saved.mean(0), 0)
        return cls(base.tolist(), slope.tolist())

    def nanoseconds(self, run: int, saved_bytes: int) -> int:
        """How long a run takes that saves so much."""
        return round(self.base[run] + self.slope[run] * saved_bytes)


def with_shared_times(observation: StepObservation) -> StepObservation:
    """The same, with the median times for all runs that save the same: copies of one block."""
    groups: dict[int, list[int]] = {}
    for k, run in enumerate(observation.runs):
        near = (at for at in groups if abs(at - run.saved) <= 0.005 * at)
        groups.setdefault(next(near, run.saved), []).append(k)
    runs = list(observation.runs)
    for members in groups.values():
        median = round(statistics.median(runs[k].nanoseconds for k in members))
        backward = round(statistics.median(runs[k].backward_nanoseconds for k in members))
        for k in members:
            runs[k] = runs[k]._replace(nanoseconds=median, backward_nanoseconds=backward)
    return observation.with_runs(runs)
