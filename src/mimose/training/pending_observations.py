"""Observed steps that were not learned from yet: their bytes at once, their times later.

Times are known only when the device has finished, and training does not wait for that. So a step is
first learned from with bytes in place of times. Its times are added later to the same cost model,
even if the regime has changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mimose.costs import Regime, StepObservation
from mimose.estimation import CostModel
from mimose.training.collector import Collector
from mimose.training.step import Step


@dataclass(slots=True)
class PendingObservation:
    """One observed step, and the cost model and regime that learned from it."""

    step: Step
    cost_model: CostModel | None = None
    regime: Regime | None = None

    @property
    def collector(self) -> Collector:
        assert self.step.collector is not None
        return self.step.collector

    def observation(self) -> StepObservation | None:
        """The observation, as far as it has been measured by now."""
        return self.collector.observation(self.step.size)

    def replaces(self, older: PendingObservation) -> bool:
        """Whether this observation has replaced an older one in the cost model."""
        same = older.cost_model is self.cost_model and older.step.size == self.step.size
        return same and older.collector.pattern == self.collector.pattern


class PendingObservations:
    """The observed steps that were not learned from yet, or whose times are not known yet."""

    def __init__(self) -> None:
        self._open: list[PendingObservation] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, step: Step) -> None:
        """An observed step is over."""
        self._open.append(PendingObservation(step))

    def new(self) -> Iterator[PendingObservation]:
        """Observations to learn from; the caller sets the cost model that has learned from each."""
        for pending in [one for one in self._open if one.cost_model is None]:
            if not self._remove(pending):
                continue
            timed = pending.collector.timed
            yield pending
            if pending.cost_model is None:  # there was nothing to learn
                continue
            self._open = [one for one in self._open if not pending.replaces(one)]
            if not timed:
                self._open.append(pending)

    def late(self) -> Iterator[PendingObservation]:
        """Observations that were learned from without their times, which are known now."""
        for pending in [one for one in self._open if one.cost_model is not None]:
            if pending.collector.timed and self._remove(pending):
                yield pending

    def _remove(self, pending: PendingObservation) -> bool:
        """Returns whether it was still open. A subscriber that is told of one may read the rest."""
        left = [one for one in self._open if one is not pending]
        was_open = len(left) < len(self._open)
        self._open = left
        return was_open
