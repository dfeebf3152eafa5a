"""The interface of contestants, and the values that they are given and return.

A contestant attaches to a fresh model, is called before and after each step, reports what it did in
the step, and detaches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from mimose.bench.arena import Arena, Trainee
from mimose.bench.batches import BatchShape
from mimose.bench.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """A contestant's report on a finished step."""

    recomputed: int | None = None
    """How many block runs were recomputed; None if the step was aborted."""
    observed: bool = False
    predicted_bytes: int | None = None
    untrusted_bytes: int | None = None
    """The peak of the plan, if it was a bound or came from an untrusted prediction."""
    real_bytes: int | None = None
    """The peak of forward and backward, to compare with the prediction."""
    peak_bytes: int = 0
    """A peak that only the contestant read, because it reset the statistics during the step."""
    held_bytes: int = 0
    """The most that the allocator held, read in the same way."""


@dataclass(frozen=True, slots=True)
class Match:
    """The conditions of a contestant: the task, its surveyed costs, and the budget."""

    arena: Arena
    survey: Survey
    budget_bytes: int | None


class Contestant(ABC):
    """One way to train under a budget."""

    name: ClassVar[str]
    budgeted: ClassVar[bool] = True
    """Whether the budget changes what it does; if not, it runs once for all budgets."""
    capped: ClassVar[bool] = True
    """Whether it runs under the allocator's hard limit."""

    def __init__(self, match: Match) -> None:
        self.match = match

    @classmethod
    def missing(cls, match: Match) -> str | None:
        """Why it cannot run here; None if it can."""
        return None

    @abstractmethod
    def attach(self, trainee: Trainee) -> None:
        """Take the model over, before the first step."""

    def step_begins(self, shape: BatchShape) -> None:  # noqa: B027 (most decide on their own)
        """A step with a batch of this shape is about to start."""

    def step_over(self) -> StepNote:
        """What was done in the step."""
        return StepNote(recomputed=0)

    def detach(self) -> None:  # noqa: B027 (the model is thrown away afterwards)
        """The run is over."""

    def spent(self) -> dict[str, Any]:
        """Where it spent time beside training, for the record."""
        return {}
