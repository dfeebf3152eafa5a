"""Observed steps that are still to be learned from: their bytes at once, their times later.

A device tells how long something took only once it has done it, and training does not wait. So a
step is learned from with bytes in the place of times, and its times are added later, to the cost
model that learned from it, whatever regime training is in by then.
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
    """One observed step, and where what it taught went."""

    step: Step
    cost_model: CostModel | None = None
    regime: Regime | None = None

    @property
    def collector(self) -> Collector:
        assert self.step.collector is not None
        return self.step.collector

    def observation(self) -> StepObservation | None:
        """What was measured, as far as it is known by now."""
        return self.collector.observation(self.step.size)

    def replaces(self, older: PendingObservation) -> bool:
        """Whether what was learned from an older observation was discarded for this one."""
        same = older.cost_model is self.cost_model and older.step.size == self.step.size
        return same and older.collector.pattern == self.collector.pattern


class PendingObservations:
    """The steps that are not learned from, or not timed."""

    def __init__(self) -> None:
        self._open: list[PendingObservation] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, step: Step) -> None:
        """An observed step is over."""
        self._open.append(PendingObservation(step))

    def new(self) -> Iterator[PendingObservation]:
        """Those to learn from; the caller notes the cost model that each one went into."""
        for pending in [one for one in self._open if one.cost_model is None]:
            self._open.remove(pending)
            timed = pending.collector.timed
            yield pending
            if pending.cost_model is None:  # nothing was to be learned from it
                continue
            self._open = [one for one in self._open if not pending.replaces(one)]
            if not timed:
                self._open.append(pending)

    def late(self) -> Iterator[PendingObservation]:
        """Those that were learned from without their times, which are known now."""
        for pending in [one for one in self._open if one.cost_model is not None]:
            if pending.collector.timed:
                self._open.remove(pending)
                yield pending
