"""How the benchmark looks into training: by what it subscribes to and by what it passes in.

`LatestStep` and `TimedPlanner` work with any handle. `Observer` trains a model that is measured and
never planned for.
"""

from __future__ import annotations

import time
from typing import final

from torch import nn

from mimose.costs import Profile, StepObservation
from mimose.interception import find_blocks
from mimose.planning import Plan, Planner, RecomputeAll
from mimose.tensors import SizeFunction
from mimose.training import Engine, Options, Scheduler, StepRecord, StepStart, Subscriber
from mimose.units import parse_budget


class LatestStep(Subscriber):
    """What training has told of its latest step."""

    def __init__(self) -> None:
        self.start: StepStart | None = None
        self.record: StepRecord | None = None
        """None until the step's backward is over."""

    def step_starts(self, step: StepStart) -> None:
        self.start, self.record = step, None

    def step_over(self, record: StepRecord) -> None:
        self.record = record


@final
class TimedPlanner(Planner):
    """Another planner, with its calls counted and timed on the host."""

    def __init__(self, inner: Planner) -> None:
        self.inner = inner
        self.count, self.seconds = 0, 0.0

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        began = time.perf_counter()
        try:
            return self.inner.plan(profile, available_bytes)
        finally:
            self.count += 1
            self.seconds += time.perf_counter() - began


@final
class Observer(LatestStep):
    """Observes every step of a model with every block recomputed, and never plans.

    Blocks are tried in the first step, so its observation is provisional and does not count. Plans
    of `planner` are not carried out.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: Planner | None = None,
        input_size: SizeFunction | None = None,
    ) -> None:
        super().__init__()
        blocks = find_blocks(model)
        self.engine = Engine(
            model,
            blocks,
            parse_budget("100%"),
            Scheduler(planner or RecomputeAll()),
            Options(observe_only=True, input_size=input_size),
        )
        self._learned: StepObservation | None = None
        self.engine.events.subscribe(self)
        self.engine.attach(blocks)

    def step_opens(self) -> None:
        self.engine.read_observations()  # of the step before, so as not to take it for this one's
        self._learned = None

    def learned(self, observation: StepObservation, *, anew: bool, seconds: float) -> None:
        self._learned = observation

    def observation(self) -> StepObservation | None:
        """What the latest step cost; None if it does not count.

        Wait for the device first: while it is busy, bytes stand in for times.
        """
        self.engine.read_observations()
        seen = self._learned
        return None if seen is None or seen.provisional else seen

    def detach(self) -> None:
        """Leave the model as it was before."""
        self.engine.detach()
