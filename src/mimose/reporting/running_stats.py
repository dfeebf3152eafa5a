"""Counts the statistics of a run while it trains."""

from __future__ import annotations

import time
from dataclasses import replace

from mimose.costs import Pace
from mimose.estimation import CostModel
from mimose.planning import Plan, PlanCache
from mimose.reporting.stats import HostStats, Stats, Times
from mimose.training import LaterBackward, StepRecord, StepStart, Subscriber


class RunningStats(Subscriber):
    """Counts from the first step after it subscribed."""

    def __init__(self) -> None:
        self._stats = Stats()
        self._timer = _StepTimer()

    def step_starts(self, step: StepStart) -> None:
        stats, reading = self._stats, step.reading
        self._timer.step_starts(step.planning_seconds)
        if not stats.steps:  # earlier peaks are not part of this run
            reading = reading._replace(peak=reading.in_use, peak_held=reading.held)
        stats.steps += 1
        stats.last_step.size = step.size
        stats.last_step.base_bytes = reading.in_use
        self._update_peaks(reading.peak, reading.peak_held)

    def step_over(self, record: StepRecord) -> None:
        stats, last = self._stats, self._stats.last_step
        self._timer.step_over(planned=not record.observed)
        self._update_peaks(record.peak_bytes or 0, record.peak_held_bytes or 0)
        last.plan = None if record.observed else record.plan
        last.predicted_peak_bytes = None if record.is_bound else record.predicted_peak_bytes
        last.real_peak_bytes = record.real_peak_bytes
        stats.shortages.evictions += record.evictions
        if record.observed or record.plan is None:
            stats.observed_steps += 1
        else:
            self._planned_step_over(record, record.plan)

    def _planned_step_over(self, record: StepRecord, plan: Plan) -> None:
        stats = self._stats
        stats.planned_steps += 1
        real, predicted = record.real_peak_bytes, record.predicted_peak_bytes
        if real is not None and predicted is not None and record.comparable:
            self._update_shortfall(real, predicted)
        stats.runs_recomputed += plan.recomputed
        stats.runs_kept += plan.kept
        self._timer.times.recompute_seconds += plan.extra_seconds

    def later_backward_over(self, later: LaterBackward) -> None:
        self._update_peaks(later.reading.peak, later.reading.peak_held)
        if later.real_peak_bytes is None or later.predicted_peak_bytes is None:
            return
        self._stats.last_step.real_peak_bytes = later.real_peak_bytes
        if later.comparable:
            self._update_shortfall(later.real_peak_bytes, later.predicted_peak_bytes)

    def memory_ran_out(self) -> None:
        self._stats.shortages.recoveries += 1

    def step_retried(self) -> None:
        self._stats.shortages.retries += 1

    def _update_shortfall(self, real: int, predicted: int) -> None:
        shortfall = (real - predicted) / real
        self._stats.worst_shortfall = max(self._stats.worst_shortfall, shortfall)

    def _update_peaks(self, peak_bytes: int, peak_held_bytes: int) -> None:
        self._stats.peak_bytes = max(self._stats.peak_bytes, peak_bytes)
        self._stats.peak_held_bytes = max(self._stats.peak_held_bytes, peak_held_bytes)

    @property
    def last_base_bytes(self) -> int:
        """Memory in use when the first block of the last step started."""
        return self._stats.last_base_bytes

    def so_far(self) -> Stats:
        """A copy of what was counted, without the values that other objects hold."""
        return replace(
            self._stats,
            times=self._timer.so_far(),
            last_step=replace(self._stats.last_step),
            shortages=replace(self._stats.shortages),
        )

    def snapshot(
        self,
        *,
        cache: PlanCache,
        cost_model: CostModel,
        budget_bytes: int | None,
        reserve_bytes: int | None,
        host: HostStats,
    ) -> Stats:
        """A copy of what was counted, with the values that other objects hold."""
        return replace(
            self.so_far(),
            cache_hits=cache.hits,
            cache_misses=cache.misses,
            budget_bytes=budget_bytes,
            reserve_bytes=reserve_bytes,
            host=host,
            uncertainty=cost_model.reliability.uncertainty,
            prediction_error=cost_model.error,
        )


class _StepTimer:
    """Adds up the times of steps, each until the next one starts, without pauses in between."""

    def __init__(self) -> None:
        self.times = Times()
        self._pace = Pace()
        self._run_began: float | None = None
        self._step_began = 0.0
        self._step_ended: float | None = None
        """When the last step ended; None while it runs."""
        self._was_planned = False

    def step_starts(self, planning_seconds: float) -> None:
        now = time.perf_counter()
        self._run_began = now if self._run_began is None else self._run_began
        if self._step_ended is not None:
            took = self._pace.seconds(self._step_ended - self._step_began, now - self._step_began)
            self.times.planned_seconds += took if self._was_planned else 0.0
        self._step_began, self._step_ended = now, None
        self.times.seconds = now - self._run_began
        self.times.planning_seconds += planning_seconds

    def step_over(self, *, planned: bool) -> None:
        self._step_ended, self._was_planned = time.perf_counter(), planned

    def so_far(self) -> Times:
        """A copy that includes the last step, if it is over."""
        planned_seconds = self.times.planned_seconds
        if self._step_ended is not None and self._was_planned:
            planned_seconds += self._step_ended - self._step_began
        return replace(self.times, planned_seconds=planned_seconds)
