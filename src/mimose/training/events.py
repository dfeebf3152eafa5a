"""What happens in training, as values for subscribers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from mimose.costs import InputSize, Link, StepObservation
from mimose.estimation import CostModel, Surprise
from mimose.memory import Reading
from mimose.planning import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is settled when the first training step is about to come."""

    device: torch.device
    blocks: tuple[str, ...]
    budget_bytes: int
    planner: object
    collector: str
    enforce: bool
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """A step whose first block is about to run."""

    size: InputSize
    reading: Reading
    planning_seconds: float
    """From the step's first block to its plan; beside the reading of memory."""
    reserve_bytes: int = 0
    """The part of the budget that its plan leaves free."""
    link: Link | None = None
    """The link to host memory; None if plans do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step whose backward is over."""

    size: InputSize
    plan: Plan | None
    """What its runs did; None if it ran without a plan, with every block recomputed."""
    new_plan: bool = False
    """Whether the plan was made for this step; the cache had it otherwise."""
    observed: bool
    """Whether its blocks were measured, to learn from them."""
    predicted_peak_bytes: int | None
    """None if the prediction was not trusted."""
    is_bound: bool = False
    """Whether the predicted peak is an upper bound, not a prediction for this size."""
    real_peak_bytes: int | None
    """The most in use during the step, where that could be seen."""
    peak_bytes: int | None
    """The most in use since the allocator's peaks were last reset, where they were read."""
    peak_held_bytes: int | None
    """The most held, likewise."""
    reserve_bytes: int
    comparable: bool = True
    """Whether the real peak may be held against the predicted one."""
    evictions: int = 0
    """How many runs had their kept activations dropped."""
    surprises: frozenset[Surprise] = frozenset()
    """What its plan did not expect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterBackward:
    """One more backward through the graph of the last step."""

    reading: Reading
    predicted_peak_bytes: int | None
    """None if the prediction was not trusted."""
    real_peak_bytes: int | None
    """The step's peak by now, where that could be seen."""
    comparable: bool
    """Whether the two may be held against each other."""


class Subscriber:
    """Is told what happens in training; overrides what it wants to know."""

    def run_starts(self, run: RunStart) -> None:
        """The first training step is about to come."""

    def step_opens(self) -> None:
        """A step is being opened: what happens from here on, its planning too, is part of it."""

    def step_starts(self, step: StepStart) -> None:
        """The first block of a step is about to run."""

    def step_over(self, record: StepRecord) -> None:
        """The backward of a step is over."""

    def later_backward_over(self, later: LaterBackward) -> None:
        """One more backward through the last step's graph is over."""

    def learned(self, observation: StepObservation, *, anew: bool, seconds: float) -> None:
        """More is known than before; nothing but this if `anew`. Learning took so many seconds."""

    def timed(self, observation: StepObservation, regime: Hashable) -> None:
        """The times of what was learned before, in this regime, are known now."""

    def regime_entered(self, regime: Hashable, cost_model: CostModel) -> None:
        """From here on steps run in this regime, of which so much is known already."""

    def memory_ran_out(self) -> None:
        """A block, or by `retry` a step, is run again because memory ran out."""

    def step_retried(self) -> None:
        """A step is run again as a whole; `memory_ran_out` has told of it before."""

    def noted(self, kind: str, text: str) -> None:
        """Something that people should know has happened."""

    def run_ends(self) -> None:
        """mimose is detached."""


class Events(Subscriber):
    """Passes every event on to all subscribers, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def run_starts(self, run: RunStart) -> None:
        for each in self._subscribers:
            each.run_starts(run)

    def step_opens(self) -> None:
        for each in self._subscribers:
            each.step_opens()

    def step_starts(self, step: StepStart) -> None:
        for each in self._subscribers:
            each.step_starts(step)

    def step_over(self, record: StepRecord) -> None:
        for each in self._subscribers:
            each.step_over(record)

    def later_backward_over(self, later: LaterBackward) -> None:
        for each in self._subscribers:
            each.later_backward_over(later)

    def learned(self, observation: StepObservation, *, anew: bool, seconds: float) -> None:
        for each in self._subscribers:
            each.learned(observation, anew=anew, seconds=seconds)

    def timed(self, observation: StepObservation, regime: Hashable) -> None:
        for each in self._subscribers:
            each.timed(observation, regime)

    def regime_entered(self, regime: Hashable, cost_model: CostModel) -> None:
        for each in self._subscribers:
            each.regime_entered(regime, cost_model)

    def memory_ran_out(self) -> None:
        for each in self._subscribers:
            each.memory_ran_out()

    def step_retried(self) -> None:
        for each in self._subscribers:
            each.step_retried()

    def noted(self, kind: str, text: str) -> None:
        for each in self._subscribers:
            each.noted(kind, text)

    def run_ends(self) -> None:
        for each in self._subscribers:
            each.run_ends()
