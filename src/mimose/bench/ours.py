"""mimose as a contestant: as it is, with the paper's scheduler, and on compiled blocks."""

from __future__ import annotations

from typing import Any, ClassVar, final

import mimose
from mimose.bench.arena import Trainee
from mimose.bench.contestant import Contestant, Match, StepNote
from mimose.bench.measuring import LatestStep, TimedPlanner
from mimose.costs import Option, StepObservation
from mimose.interception import find_blocks
from mimose.planning import Greedy, Optimal, Planner
from mimose.training import StepRecord, StepStart


class Spending(LatestStep):
    """What was planned, and the host time that learning and deciding took, and in which steps."""

    def __init__(self) -> None:
        super().__init__()
        self.fits = self.repeated_decisions = 0
        self.fit_seconds = self.deciding_seconds = 0.0
        self.in_observed_seconds = 0.0
        """Learning and deciding within observed steps."""
        self.new_plan_seconds = self.repeating_seconds = 0.0
        """Deciding in steps that got a new plan; in others that ran under a plan."""
        self._since = 0.0
        """Learning and deciding since the last step was over."""

    @property
    def planned_peak(self) -> int | None:
        """The peak of the latest step by its plan; None if it had none."""
        if self.start is None or self.record is None or self.record.plan is None:
            return None
        return self.start.reading.in_use + self.record.plan.peak_bytes

    def learned(self, observation: StepObservation, *, anew: bool, seconds: float) -> None:
        self.fits += 1
        self.fit_seconds += seconds
        self._since += seconds

    def step_starts(self, step: StepStart) -> None:
        super().step_starts(step)
        self.deciding_seconds += step.planning_seconds
        self._since += step.planning_seconds

    def step_over(self, record: StepRecord) -> None:
        super().step_over(record)
        if record.observed:
            self.in_observed_seconds += self._since
        self._since = 0.0
        deciding = 0.0 if self.start is None else self.start.planning_seconds
        if record.new_plan:
            self.new_plan_seconds += deciding
        elif not record.observed:
            self.repeated_decisions += 1
            self.repeating_seconds += deciding


class _Mimose(Contestant):
    planner: ClassVar[type[Planner]] = Optimal
    collector: ClassVar[str] = "ride"
    choices: ClassVar[tuple[str, ...]] = tuple(option.value for option in Option)

    def attach(self, trainee: Trainee) -> None:
        # What the warm-up does for others: kernels load, code runs once. What is seen is forgotten.
        with self._attached(trainee, self.planner()):
            trainee.warm_up(min(self.match.arena.shapes))
        self._begin(trainee)

    def _begin(self, trainee: Trainee) -> None:
        self._planning, self._spending = TimedPlanner(self.planner()), Spending()
        self._handle = self._attached(trainee, self._planning)
        self._handle.subscribe(self._spending)

    def _attached(self, trainee: Trainee, planner: Planner) -> mimose.Mimose:
        assert self.match.budget_bytes is not None
        return mimose.auto_checkpoint(
            trainee.model,
            self.match.budget_bytes,
            planner=planner,
            collector=self.collector,
            choices=self.choices,
            input_size=self.match.arena.input_size,
        )

    def step_over(self) -> StepNote:
        record = self._spending.record
        if record is None:
            return StepNote()
        runs = len(self.match.survey.observations[0].pattern)
        predicted = None if record.is_bound else record.predicted_peak_bytes
        planned = None if record.observed else self._spending.planned_peak
        return StepNote(
            recomputed=runs if record.plan is None else record.plan.recomputed,
            observed=record.observed,
            predicted_bytes=predicted,
            untrusted_bytes=planned if predicted is None else None,
            real_bytes=None if record.observed else record.real_peak_bytes,
            peak_bytes=record.peak_bytes or 0,
            held_bytes=record.peak_held_bytes or 0,
        )

    def detach(self) -> None:
        self._handle.detach()

    def spent(self) -> dict[str, Any]:
        stats, spending = self._handle.stats(), self._spending
        return {
            "observed_steps": stats.observed_steps,
            "planned_steps": stats.planned_steps,
            "cache_hits": stats.cache_hits,
            "cache_misses": stats.cache_misses,
            "fits": spending.fits,
            "fit_seconds": spending.fit_seconds,
            "plans": stats.cache_misses,
            "plan_seconds": self._planning.seconds,
            "new_plan_seconds": spending.new_plan_seconds,
            "deciding_seconds": spending.deciding_seconds,
            "counted_in_observed_seconds": spending.in_observed_seconds,
            "repeated_decisions": spending.repeated_decisions,
            "repeating_seconds": spending.repeating_seconds,
            "recompute_seconds": stats.recompute_seconds,
            "reserve_bytes": stats.reserve_bytes,
            "prediction_error": stats.prediction_error,
            "evictions": stats.evictions,
        }


@final
class Ours(_Mimose):
    """mimose as it comes: `auto_checkpoint(model, budget)`."""

    name = "mimose"


@final
class TwoOptions(_Mimose):
    """mimose without the host: blocks are kept or recomputed."""

    name = "mimose-two-options"
    choices = ("keep", "recompute")


@final
class GreedyShuttle(_Mimose):
    """The paper's scheduler, in one reading of it, and its shuttling collector, inside mimose.

    So with mimose's recompute, estimator, reserve and evictions. `paper` has none of these.
    """

    name = "greedy+shuttle"
    planner, collector = Greedy, "shuttle"


@final
class OursCompiled(_Mimose):
    """mimose on blocks that are compiled one by one."""

    name = "mimose-compiled"

    @classmethod
    def missing(cls, match: Match) -> str | None:
        return needs_cuda(match)

    def attach(self, trainee: Trainee) -> None:
        for block in find_blocks(trainee.model):
            block.module.compile(dynamic=True)
        self._begin(trainee)  # compiling counts

    def detach(self) -> None:
        super().detach()
        forget_compiled()


def needs_cuda(match: Match) -> str | None:
    if match.arena.device.type == "cuda":
        return None
    return "on a CPU memory is counted by a dispatch mode, which compiled code does not pass"


def forget_compiled() -> None:
    import torch._dynamo

    torch._dynamo.reset()
