"""Statistics of a run, and explanations of plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from mimose.costs import InputSize, Pace, Profile, RunCost
from mimose.estimation import CostModel
from mimose.planning import KeepAll, Plan, PlanCache, Planner, RecomputeAll
from mimose.reporting.notebook import explanation_html, stats_html
from mimose.training import LaterBackward, Setting, StepRecord, StepStart, Subscriber
from mimose.units import text_of


@dataclass(slots=True)
class Stats(Subscriber):
    """Statistics of a run so far; print them for a summary."""

    steps: int = 0
    """Training steps so far, observed and planned."""
    observed_steps: int = 0
    """Steps in which costs were measured."""
    planned_steps: int = 0
    """Steps that ran under a plan."""
    cache_hits: int = 0
    """Plans taken from the plan cache."""
    cache_misses: int = 0
    """Plans made by the planner."""
    peak_bytes: int = 0
    """The highest memory in use during the run, even if CUDA's statistics were reset."""
    peak_held_bytes: int = 0
    """The most that the allocator has held."""
    budget_bytes: int | None = None
    """The budget; None for "auto" or a percentage until the first step."""
    reserve_bytes: int | None = None
    """The part of the budget that plans leave free."""
    uncertainty: float = 0.0
    """The largest recent underestimate of a step's rise in memory, as a share of the prediction.
    Plans leave room for it."""
    prediction_error: float | None = None
    """The estimator's leave-one-out error of the peak, as a share of the peak."""
    runs_kept: int = 0
    """Runs of blocks that kept their activations, in planned steps."""
    runs_recomputed: int = 0
    """Runs of blocks that were recomputed, in planned steps."""
    recompute_seconds: float = 0.0
    """Predicted time of recomputing in planned steps."""
    planned_seconds: float = 0.0
    """Time of planned steps, each until the start of the next one, without pauses."""
    seconds: float = 0.0
    """From the start of the first step to the start of the last one."""
    planning_seconds: float = 0.0
    """Time spent on choosing plans in all steps, without reading memory statistics."""
    last_size: InputSize | None = None
    """Input size of the last step."""
    last_plan: Plan | None = None
    """Plan of the last step; None if it was observed."""
    last_base_bytes: int = 0
    """Memory in use when the first block of the last step started."""
    last_predicted_peak_bytes: int | None = None
    """Predicted peak of the last step; None if it was observed or only had an upper bound."""
    last_real_peak_bytes: int | None = None
    """Real peak of the last step; None if it could not be measured."""
    worst_shortfall: float = 0.0
    """The largest underestimate of a peak, as a share of the real peak."""
    recoveries: int = 0
    """How often memory ran out and a block (or, with `retry`, a step) was run again."""
    evictions: int = 0
    """Kept runs whose activations were dropped in mid-step because memory ran short."""
    _began: float | None = field(default=None, repr=False)
    _opened: float = field(default=0.0, repr=False)
    _over: float | None = field(default=None, repr=False)
    """When the last step ended; None while it runs."""
    _was_planned: bool = field(default=False, repr=False)
    _pace: Pace = field(default_factory=Pace, repr=False)

    @property
    def recompute_share(self) -> float:
        """Share of the planned steps' time that was spent on recomputing."""
        if not self.planned_seconds:
            return 0.0
        return min(1.0, self.recompute_seconds / self.planned_seconds)

    def step_starts(self, step: StepStart) -> None:
        now, reading = time.perf_counter(), step.reading
        self._began = now if self._began is None else self._began
        if self._over is not None:
            took = self._pace.seconds(self._over - self._opened, now - self._opened)
            self.planned_seconds += took if self._was_planned else 0.0
        self._opened, self._over = now, None
        self.seconds = now - self._began
        if not self.steps:  # earlier peaks are not part of this run
            reading = reading._replace(peak=reading.in_use, peak_held=reading.held)
        self.steps += 1
        self.planning_seconds += step.planning_seconds
        self.last_size = step.size
        self.last_base_bytes = reading.in_use
        self._note_peaks(reading.peak, reading.peak_held)

    def step_over(self, record: StepRecord) -> None:
        self._over, self._was_planned = time.perf_counter(), not record.observed
        self._note_peaks(record.peak_bytes or 0, record.peak_held_bytes or 0)
        self.last_plan = None if record.observed else record.plan
        self.evictions += record.evictions
        self.last_predicted_peak_bytes = None if record.is_bound else record.predicted_peak_bytes
        self.last_real_peak_bytes = record.real_peak_bytes
        if record.observed or record.plan is None:
            self.observed_steps += 1
        else:
            self._planned_step_over(record, record.plan)

    def _planned_step_over(self, record: StepRecord, plan: Plan) -> None:
        self.planned_steps += 1
        real, predicted = record.real_peak_bytes, record.predicted_peak_bytes
        if real is not None and predicted is not None and record.comparable:
            self._note_shortfall(real, predicted)
        self.runs_recomputed += plan.recomputed
        self.runs_kept += plan.kept
        self.recompute_seconds += plan.extra_seconds

    def later_backward_over(self, later: LaterBackward) -> None:
        self._note_peaks(later.reading.peak, later.reading.peak_held)
        if later.real_peak_bytes is None or later.predicted_peak_bytes is None:
            return
        self.last_real_peak_bytes = later.real_peak_bytes
        if later.comparable:
            self._note_shortfall(later.real_peak_bytes, later.predicted_peak_bytes)

    def memory_ran_out(self) -> None:
        self.recoveries += 1

    def _note_shortfall(self, real: int, predicted: int) -> None:
        self.worst_shortfall = max(self.worst_shortfall, (real - predicted) / real)

    def _note_peaks(self, peak_bytes: int, peak_held_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.peak_held_bytes = max(self.peak_held_bytes, peak_held_bytes)

    def filled_in(
        self,
        *,
        cache: PlanCache,
        cost_model: CostModel,
        budget_bytes: int | None,
        reserve_bytes: int | None,
    ) -> Stats:
        """A copy with the values that other objects hold."""
        last = self._over - self._opened if self._over is not None and self._was_planned else 0.0
        return replace(
            self,
            planned_seconds=self.planned_seconds + last,
            cache_hits=cache.hits,
            cache_misses=cache.misses,
            budget_bytes=budget_bytes,
            reserve_bytes=reserve_bytes,
            uncertainty=cost_model.reliability.uncertainty,
            prediction_error=cost_model.error,
        )

    def __str__(self) -> str:
        runs = self.runs_kept + self.runs_recomputed
        share = self.runs_recomputed / runs if runs else 0.0
        lines = [
            f"{_steps(self.steps)}: {self.observed_steps} observed, {self.planned_steps} planned",
            f"plans: {self.cache_hits} from the cache, {self.cache_misses} new",
            f"recomputed in planned steps: {share:.1%} of block runs, about "
            f"{self.recompute_share:.1%} of the time",
            f"peak {text_of(self.peak_bytes)} in use, {text_of(self.peak_held_bytes)} held"
            + (f", budget {text_of(self.budget_bytes)}" if self.budget_bytes else "")
            + (": OVER" if self.budget_bytes and self.peak_held_bytes > self.budget_bytes else ""),
        ]
        if self.recoveries:
            lines.append(f"ran out of memory {_times(self.recoveries)} and recovered")
        if self.evictions:
            lines.append(f"dropped the kept activations of {_runs(self.evictions)} in mid-step")
        if self.reserve_bytes is not None:
            lines.append(
                f"reserve {text_of(self.reserve_bytes)}, uncertainty {self.uncertainty:.2%}"
            )
        if self.prediction_error is not None:
            lines.append(f"prediction error (leave one out): {self.prediction_error:.2%}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return stats_html(self)


_REMEDY = "raise the budget, use smaller batches, or choose smaller blocks with blocks="


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _runs(count: int) -> str:
    return "1 run of a block" if count == 1 else f"{count} runs of blocks"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@dataclass(frozen=True, slots=True)
class Floor:
    """The memory of a model that needs no training to know."""

    budget_bytes: int | None
    """None for "auto" or a percentage until the first step."""
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan for a batch of this size, and the costs that lead to it."""

    size: InputSize
    """The explained input size."""
    blocks: tuple[str, ...]
    """The names of the blocks."""
    budget_bytes: int | None = None
    """The budget; None for "auto" or a percentage until the first step."""
    reserve_bytes: int = 0
    """The part of the budget that plans leave free."""
    base_bytes: int = 0
    """Memory in use when the first block starts: parameters, gradients, optimizer state, inputs."""
    parameter_bytes: int = 0
    """Size of the parameters."""
    gradient_bytes: int = 0
    """Size of all gradients."""
    profile: Profile | None = None
    """The cost of each run of a block at this size; None if this size cannot be predicted."""
    plan: Plan | None = None
    """Which runs are kept and which are recomputed; None if this size cannot be predicted."""
    peak_kept_bytes: int | None = None
    """The peak if all blocks were kept."""
    peak_recomputed_bytes: int | None = None
    """The peak if all blocks were recomputed."""
    at_most_as: InputSize | None = None
    """The size whose costs and peaks serve as upper bounds; None if they are predictions."""
    note: str = ""
    """A remark to read first, for instance that mimose is not attached."""
    largest_batch: int | None = None
    """Approximate largest batch of this shape that fits, with every block recomputed."""

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The predicted peak under the plan."""
        return None if self.plan is None else self.base_bytes + self.plan.peak_bytes

    @property
    def bound_in_words(self) -> str:
        """Where the upper bounds come from; empty for predictions."""
        if self.at_most_as is None:
            return ""
        return f"measured at {self.at_most_as}: too few sizes were observed to predict this one"

    def __str__(self) -> str:
        lines = [f"input {self.size}", *([self.note] if self.note else [])]
        if self.budget_bytes is not None:
            lines.append(
                f"budget {text_of(self.budget_bytes)}, including a reserve of "
                f"{text_of(self.reserve_bytes)}"
            )
        floor = f"parameters {text_of(self.parameter_bytes)}"
        if self.base_bytes:
            other = max(0, self.base_bytes - self.parameter_bytes)
            floor = (
                f"in use at the start: {text_of(self.base_bytes)} ({floor}, optimizer state and "
                f"other {text_of(other)})"
            )
        lines.append(f"{floor}; gradients {text_of(self.gradient_bytes)}")
        if self.profile is None or self.plan is None:
            if not self.note:
                lines.append("no prediction for this size yet: its next step is observed")
            return "\n".join(lines)
        return "\n".join([*lines, *self._plan_lines(self.profile, self.plan)])

    def _repr_html_(self) -> str:
        return explanation_html(self)

    def _plan_lines(self, profile: Profile, plan: Plan) -> list[str]:
        assert self.peak_kept_bytes is not None
        assert self.peak_recomputed_bytes is not None
        verdict = "fits" if plan.fits else f"DOES NOT FIT: {_REMEDY}"
        bound = self.at_most_as is not None
        if bound and not plan.fits:
            verdict = "may not fit"
        peak = "peak at most" if bound else "peak"
        lines = [
            *([f"upper bounds, {self.bound_in_words}:"] if bound else []),
            f"{peak} with all blocks kept: {text_of(self.peak_kept_bytes)}, all recomputed: "
            f"{text_of(self.peak_recomputed_bytes)}, this plan: "
            f"{text_of(self.base_bytes + plan.peak_bytes)}: {verdict}",
            f"plan {plan}: {plan.kept} of {len(plan.choices)} kept, "
            f"{plan.extra_seconds * 1e3:.1f} ms of recompute",
        ]
        lines += _block_lines(self.blocks, profile, plan)
        if self.largest_batch and not bound:
            lines.append(
                f"largest batch of this shape with every block recomputed: about "
                f"{self.largest_batch}"
            )
        return lines


def _block_lines(blocks: Sequence[str], profile: Profile, plan: Plan) -> Iterator[str]:
    """The choice and the cost of each block; equal neighbours share a line."""
    rows = [
        ("fixed" if run.fixed else option.value, _cost(run))
        for run, option in zip(profile.runs, plan.choices, strict=True)
    ]
    for (choice, cost), group in groupby(zip(blocks, rows, strict=False), key=lambda pair: pair[1]):
        names = [name for name, _ in group]
        shown = f"{names[0]} … {names[-1]} ({len(names)} blocks, each)" if names[1:] else names[0]
        yield f"  {choice:9}  {shown}: {cost}"


def _cost(run: RunCost) -> str:
    return f"saves {text_of(run.saved)}, recompute takes {run.nanoseconds / 1e6:.2f} ms"


def explain_plan(
    *,
    size: InputSize,
    blocks: list[str],
    cost_model: CostModel,
    planner: Planner,
    setting: Setting | None,
    base_bytes: int,
    floor: Floor,
) -> Explanation:
    """Explain the plan for this size."""
    common: dict[str, Any] = {
        "size": size,
        "blocks": tuple(blocks),
        "budget_bytes": floor.budget_bytes,
        "base_bytes": base_bytes,
        "parameter_bytes": floor.parameter_bytes,
        "gradient_bytes": floor.gradient_bytes,
    }
    if setting is None:
        return Explanation(**common)
    common["reserve_bytes"] = setting.reserve.bytes
    missing = _missing_bytes(setting)
    estimate, pattern = cost_model.predict(size), cost_model.pattern_for(size)
    if estimate is None or pattern is None:
        return Explanation(**common)
    profile = estimate.profile
    if profile.prelude and setting.open:
        common["base_bytes"] = base_bytes = setting.meter.read().in_use + profile.prelude
    profile = profile.in_step(cost_model.conditions(pattern, missing))
    uncertainty = (1 + cost_model.reliability.uncertainty) * (1 + estimate.uncertainty)
    available = int(setting.available(base_bytes) / uncertainty)
    strictest = RecomputeAll().plan(profile, available)
    common["blocks"] = tuple(blocks[index] for index, _ in pattern)
    return Explanation(
        **common,
        profile=profile,
        plan=planner.plan(profile, available),
        peak_kept_bytes=base_bytes + KeepAll().plan(profile, available).peak_bytes,
        peak_recomputed_bytes=base_bytes + strictest.peak_bytes,
        at_most_as=estimate.bound_of,
        largest_batch=_largest_batch(size, strictest, available),
    )


def _missing_bytes(setting: Setting) -> int:
    """Bytes of gradients that the next step will allocate; after `detach`, those of all
    parameters."""
    if not setting.open:
        return setting.gradient_bytes
    return setting.gradients.missing_bytes(setting.gradients.missing())


def _largest_batch(size: InputSize, strictest: Plan, available: int) -> int | None:
    """Scale in proportion: slightly low, since part of the peak does not grow with the batch."""
    if not size.layout[0][1] or strictest.peak_bytes <= 0:
        return None
    return max(0, int(size.dims[0] * available / strictest.peak_bytes))
