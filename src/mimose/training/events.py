"""The events of training, as values for subscribers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from mimose.costs import InputSize, Link, StepObservation
from mimose.estimation import CostModel, Surprise
from mimose.memory import Reading
from mimose.planning import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The settings of a run, sent before its first training step."""

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
    """The start of a step; its first block is about to run."""

    size: InputSize
    reading: Reading
    planning_seconds: float
    """From the call of the step's first block to its plan, without reading memory."""
    reserve_bytes: int = 0
    """The part of the budget that the plan leaves free."""
    link: Link | None = None
    """The link to host memory; None if plans do not use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The result of a step whose backward is over."""

    size: InputSize
    plan: Plan | None
    """How its runs were executed; None if every block was recomputed for lack of a plan."""
    new_plan: bool = False
    """Whether the plan was made for this step; False if it came from the cache."""
    observed: bool
    """Whether its blocks were measured to learn their costs."""
    predicted_peak_bytes: int | None
    """None if the prediction was not trusted."""
    is_bound: bool = False
    """Whether the predicted peak is an upper bound, not a prediction for this size."""
    real_peak_bytes: int | None
    """The highest memory in use during the step; None if unknown."""
    peak_bytes: int | None
    """The highest memory in use since the allocator's peaks were last reset; None if not read."""
    peak_held_bytes: int | None
    """The highest memory held since then; None if not read."""
    reserve_bytes: int
    comparable: bool = True
    """Whether the real and the predicted peak may be compared."""
    evictions: int = 0
    """The number of runs whose kept activations were dropped."""
    surprises: frozenset[Surprise] = frozenset()
    """The events that its plan did not expect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterBackward:
    """Another backward through the graph of the last step."""

    reading: Reading
    predicted_peak_bytes: int | None
    """None if the prediction was not trusted."""
    real_peak_bytes: int | None
    """The step's peak so far; None if unknown."""
    comparable: bool
    """Whether the two peaks may be compared."""


class Subscriber:
    """Receives the events of training; override the methods that you need.

    Here every method does nothing. Methods are called while training runs, so keep them short.

    >>> class PrintPeaks(Subscriber):
    ...     def step_over(self, record: StepRecord) -> None:
    ...         print(record.size, record.plan, record.peak_bytes)
    """

    def run_starts(self, run: RunStart) -> None:
        """The first training step is about to begin."""

    def step_opens(self) -> None:
        """A step begins: all further events, those of its planning included, are part of it."""

    def step_starts(self, step: StepStart) -> None:
        """The first block of a step is about to run."""

    def step_over(self, record: StepRecord) -> None:
        """The backward of a step is over."""

    def later_backward_over(self, later: LaterBackward) -> None:
        """Another backward through the last step's graph is over."""

    def learned(self, observation: StepObservation, *, anew: bool, seconds: float) -> None:
        """An observation was learned, which took `seconds`.

        If `anew`, all older observations were discarded.
        """

    def timed(self, observation: StepObservation, regime: Hashable) -> None:
        """The times of an observation that was learned before, in this regime, are now known."""

    def regime_entered(self, regime: Hashable, cost_model: CostModel) -> None:
        """Further steps run in this regime; `cost_model` contains what is known of it already."""

    def memory_ran_out(self) -> None:
        """Memory ran out: a block is run again, or by `retry` a step."""

    def step_retried(self) -> None:
        """A whole step is run again; follows `memory_ran_out` for the same failure."""

    def noted(self, kind: str, text: str) -> None:
        """An event for the reader of a recording, in words."""

    def run_ends(self) -> None:
        """mimose is detached."""


EVENTS = [name for name in vars(Subscriber) if not name.startswith("_")]


class Events(Subscriber):
    """Passes every event on to all subscribers, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        for name in EVENTS:
            setattr(self, name, self._to_all(name))

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def _to_all(self, event: str) -> Callable[..., None]:
        subscribers = self._subscribers

        def tell_all(*args: Any, **kwargs: Any) -> None:
            for each in subscribers:
                getattr(each, event)(*args, **kwargs)

        return tell_all
