"""Observed steps on their way into what is known: their bytes at once, their times when they come.

A device tells how long something took only once it has got there, and nobody waits for it. So a
step is learned from with bytes in the place of times, and its times are taken in later: into the
knowledge that it went to, whatever regime training is in by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mimose.costs import Regime, StepObservation
from mimose.estimation import Knowledge
from mimose.training.steps import ObservedStep


@dataclass(slots=True)
class Lesson:
    """One observed step, and where what it taught went."""

    step: ObservedStep
    knowledge: Knowledge | None = None
    regime: Regime | None = None

    def observation(self) -> StepObservation | None:
        """What was seen, as far as it is known by now."""
        return self.step.ride.observation(self.step.size)

    def replaces(self, older: Lesson) -> bool:
        """Whether what an older lesson has taught has made way for this one."""
        same = older.knowledge is self.knowledge and older.step.size == self.step.size
        return same and older.step.ride.pattern == self.step.ride.pattern


class Lessons:
    """The steps that are not learned from, or not timed."""

    def __init__(self) -> None:
        self._open: list[Lesson] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, step: ObservedStep) -> None:
        """An observed step is over."""
        self._open.append(Lesson(step))

    def new(self) -> Iterator[Lesson]:
        """Those to learn from; whoever does says into which knowledge it went."""
        for lesson in [one for one in self._open if one.knowledge is None]:
            self._open.remove(lesson)
            timed = lesson.step.ride.timed
            yield lesson
            if lesson.knowledge is None:  # nothing was to be learned from it
                continue
            self._open = [one for one in self._open if not lesson.replaces(one)]
            if not timed:
                self._open.append(lesson)

    def late(self) -> Iterator[Lesson]:
        """Those that were learned from without their times, which are known now."""
        for lesson in [one for one in self._open if one.knowledge is not None]:
            if lesson.step.ride.timed:
                self._open.remove(lesson)
                yield lesson
