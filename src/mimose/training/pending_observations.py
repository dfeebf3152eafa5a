"""Observed steps on their way into what is known: their bytes at once, their times when they come.

A device tells how long something took only once it has got there, and nobody waits for it. So a
step is learned from with bytes in the place of times, and its times are taken in later: into the
cost model that it went to, whatever regime training is in by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mimose.costs import Regime, StepObservation
from mimose.estimation import CostModel
from mimose.training.steps import ObservedStep


@dataclass(slots=True)
class PendingObservation:
    """One observed step, and where what it taught went."""

    step: ObservedStep
    cost_model: CostModel | None = None
    regime: Regime | None = None

    def observation(self) -> StepObservation | None:
        """What was seen, as far as it is known by now."""
        return self.step.collector.observation(self.step.size)

    def replaces(self, older: PendingObservation) -> bool:
        """Whether what was learned from an older observation was discarded for this one."""
        same = older.cost_model is self.cost_model and older.step.size == self.step.size
        return same and older.step.collector.pattern == self.step.collector.pattern


class PendingObservations:
    """The steps that are not learned from, or not timed."""

    def __init__(self) -> None:
        self._open: list[PendingObservation] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, step: ObservedStep) -> None:
        """An observed step is over."""
        self._open.append(PendingObservation(step))

    def new(self) -> Iterator[PendingObservation]:
        """Those to learn from; the caller notes the cost model that each one went into."""
        for pending in [one for one in self._open if one.cost_model is None]:
            self._open.remove(pending)
            timed = pending.step.collector.timed
            yield pending
            if pending.cost_model is None:  # nothing was to be learned from it
                continue
            self._open = [one for one in self._open if not pending.replaces(one)]
            if not timed:
                self._open.append(pending)

    def late(self) -> Iterator[PendingObservation]:
        """Those that were learned from without their times, which are known now."""
        for pending in [one for one in self._open if one.cost_model is not None]:
            if pending.step.collector.timed:
                self._open.remove(pending)
                yield pending
