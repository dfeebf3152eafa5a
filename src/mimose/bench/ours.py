"""mimose as a contestant: as it is, as the paper published it, and on compiled blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, final

import mimose
from mimose.bench.arena import Trainee
from mimose.bench.contestants import Contestant, Match, StepNote
from mimose.interception import find_blocks
from mimose.training import ObservedStep, PlannedStep, RecomputeCollector


class Stopwatch:
    """How often something was called, and how long it took on the host."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its calls counted and timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.count += 1
                self.seconds += time.perf_counter() - began

        return timed


class _Mimose(Contestant):
    planner: ClassVar[str] = "optimal"
    collector: ClassVar[str] = "ride"

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        self.fitting, self.predicting, self.planning = Stopwatch(), Stopwatch(), Stopwatch()

    def attach(self, trainee: Trainee) -> None:
        # What the warm-up does for others: kernels load, code runs once. What is seen is forgotten.
        with self._attached(trainee):
            trainee.warm_up(min(self.match.arena.shapes))
        self._begin(trainee)

    def _begin(self, trainee: Trainee) -> None:
        self.handle = handle = self._attached(trainee)
        scheduler = handle._engine.scheduler
        vars(scheduler)["learn"] = self.fitting.around(scheduler.learn)
        vars(scheduler)["predict"] = self.predicting.around(scheduler.predict)
        vars(scheduler.planner)["plan"] = self.planning.around(scheduler.planner.plan)
        self._observed = self._planned = self._recomputed = 0
        self._counted = self._counted_in_observed = self._decided = self._repeating = 0.0
        self._sizes = self._repeats = 0

    def _attached(self, trainee: Trainee) -> mimose.Mimose:
        assert self.match.budget_bytes is not None
        return mimose.auto_checkpoint(
            trainee.model, self.match.budget_bytes, planner=self.planner, collector=self.collector
        )

    def step_over(self) -> StepNote:
        stats = self.handle._stats  # the handle's own copy would read observations too early
        observed = stats.observed_steps > self._observed
        planned = stats.planned_steps > self._planned
        recomputed = stats.runs_recomputed - self._recomputed
        self._observed, self._planned = stats.observed_steps, stats.planned_steps
        self._recomputed = stats.runs_recomputed
        elsewhere = self.fitting.seconds + stats.planning_seconds
        if observed:  # what is counted as the estimator's or the planner's is not the collector's
            self._counted_in_observed += elsewhere - self._counted
        self._counted = elsewhere
        sizes = (
            len(self.handle._engine.scheduler.cache) + self.handle._engine.scheduler.cache.misses
        )
        if planned and sizes == self._sizes:  # one that was planned for before
            self._repeats += 1
            self._repeating += stats.planning_seconds - self._decided
        self._decided, self._sizes = stats.planning_seconds, sizes
        if observed:
            step = self.handle._engine._last_step
            collector: RecomputeCollector | None = (
                step.collector if isinstance(step, ObservedStep) else None
            )
            runs = len(self.match.survey.observations[0].pattern)
            kept, peak = (collector.kept, collector.peak) if collector else (0, 0)
            return StepNote(recomputed=runs - kept, observed=True, peak_bytes=peak)
        if planned:
            step = self.handle._engine._last_step
            exact = isinstance(step, PlannedStep) and step.exact  # else a larger size's prediction
            return StepNote(
                recomputed=recomputed,
                predicted_bytes=stats.last_predicted_peak_bytes if exact else None,
                real_bytes=stats.last_real_peak_bytes,
            )
        return StepNote()

    def detach(self) -> None:
        self.handle.detach()

    def spent(self) -> dict[str, Any]:
        stats = self.handle.stats()
        return {
            "observed_steps": stats.observed_steps,
            "planned_steps": stats.planned_steps,
            "cache_hits": stats.cache_hits,
            "cache_misses": stats.cache_misses,
            "fits": self.fitting.count,
            "fit_seconds": self.fitting.seconds,
            "plans": stats.cache_misses,
            "plan_seconds": self.planning.seconds,
            "predict_seconds": self.predicting.seconds,
            "deciding_seconds": stats.planning_seconds,
            "counted_in_observed_seconds": self._counted_in_observed,
            "repeated_decisions": self._repeats,
            "repeating_seconds": self._repeating,
            "recompute_seconds": stats.recompute_seconds,
            "reserve_bytes": stats.reserve_bytes,
            "prediction_error": stats.prediction_error,
        }


@final
class Ours(_Mimose):
    """mimose as it comes: `auto_checkpoint(model, budget)`."""

    name = "mimose"


@final
class Paper(_Mimose):
    """The paper's scheduler, in one reading of it, with its shuttling collector.

    In mimose's session, so with its recompute, its reserve and its corrections in the middle of a
    step: it is not the authors' code.
    """

    name = "paper"
    planner, collector = "greedy", "shuttle"


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
