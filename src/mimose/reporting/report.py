"""What people see: statistics of a run, and why a batch gets its plan."""

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
    """What has happened so far. Bytes, seconds and counts; printed, it reads well."""

    steps: int = 0
    """Training steps so far, observed and planned."""
    observed_steps: int = 0
    """Steps in which blocks were recomputed to learn what they cost."""
    planned_steps: int = 0
    """Steps that ran under a plan."""
    cache_hits: int = 0
    """Plans that were at hand."""
    cache_misses: int = 0
    """Plans that had to be made."""
    peak_bytes: int = 0
    """The highest memory in use of the whole run, whatever resets came in between."""
    peak_held_bytes: int = 0
    """The most that the allocator has held."""
    budget_bytes: int | None = None
    """The budget; None before a relative one is settled."""
    reserve_bytes: int | None = None
    """The part of the budget that plans leave free."""
    margin: float = 0.0
    """What plans leave free beyond predictions, as a share of the predicted rise; learned. Negative
    where predictions have long been too high: plans then reckon with so much less."""
    prediction_error: float | None = None
    """The estimator's own leave-one-out error of the peak, as a share of it."""
    runs_kept: int = 0
    """Runs of blocks that kept their activations, in planned steps."""
    runs_recomputed: int = 0
    """Runs of blocks that were recomputed, in planned steps."""
    recompute_seconds: float = 0.0
    """In planned steps, as predicted."""
    planned_seconds: float = 0.0
    """What planned steps took, each until the next one began; pauses between steps left out."""
    seconds: float = 0.0
    """Between the first step's start and the last one's."""
    planning_seconds: float = 0.0
    """From a step's first block to its plan, over all steps; beside the reading of memory."""
    last_size: InputSize | None = None
    """The input of the last step."""
    last_plan: Plan | None = None
    """The last step's; None if that was observed."""
    last_base_bytes: int = 0
    """In use when the first block of the last step started."""
    last_predicted_peak_bytes: int | None = None
    """The last step's; None if that was observed, or only an upper bound of its size is known."""
    last_real_peak_bytes: int | None = None
    """The last step's, where it could be seen."""
    worst_shortfall: float = 0.0
    """The most that a predicted peak was under the real one, as a share of it."""
    recoveries: int = 0
    """How often memory ran out and a block, or by `retry` a step, was run again."""
    corrections: int = 0
    """Steps whose plan became stricter while they ran."""
    _began: float | None = field(default=None, repr=False)
    _opened: float = field(default=0.0, repr=False)
    _over: float | None = field(default=None, repr=False)
    """When the last step was over; None while it runs."""
    _was_planned: bool = field(default=False, repr=False)
    _pace: Pace = field(default_factory=Pace, repr=False)

    @property
    def recompute_share(self) -> float:
        """The share of the planned steps' time that recomputing took."""
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
        if not self.steps:  # what was before is not of this run
            reading = reading._replace(peak=reading.in_use, peak_held=reading.held)
        self.steps += 1
        self.planning_seconds += step.planning_seconds
        self.last_size = step.size
        self.last_base_bytes = reading.in_use
        self._note_peaks(reading.peak, reading.peak_held)

    def step_over(self, record: StepRecord) -> None:
        self._over, self._was_planned = time.perf_counter(), record.plan is not None
        self._note_peaks(record.peak_bytes or 0, record.peak_held_bytes or 0)
        self.last_plan = record.plan
        self.last_predicted_peak_bytes = None if record.is_bound else record.predicted_peak_bytes
        self.last_real_peak_bytes = record.real_peak_bytes
        if record.plan is None:
            self.observed_steps += 1
        else:
            self._planned_step_over(record, record.plan)

    def _planned_step_over(self, record: StepRecord, plan: Plan) -> None:
        self.planned_steps += 1
        self.corrections += record.corrected
        real, predicted = record.real_peak_bytes, record.predicted_peak_bytes
        if real is not None and predicted is not None and record.comparable:
            self._note_shortfall(real, predicted)
        self.runs_recomputed += sum(plan.recompute)
        self.runs_kept += plan.kept
        self.recompute_seconds += plan.recompute_seconds

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
        """A copy with what others count."""
        last = self._over - self._opened if self._over is not None and self._was_planned else 0.0
        return replace(
            self,
            planned_seconds=self.planned_seconds + last,
            cache_hits=cache.hits,
            cache_misses=cache.misses,
            budget_bytes=budget_bytes,
            reserve_bytes=reserve_bytes,
            margin=cost_model.prediction_margin.margin,
            prediction_error=cost_model.error,
        )

    def __str__(self) -> str:
        runs = self.runs_kept + self.runs_recomputed
        share = self.runs_recomputed / runs if runs else 0.0
        lines = [
            f"{_steps(self.steps)}: {self.observed_steps} observed, {self.planned_steps} planned",
            f"plans: {self.cache_hits} from the cache, {self.cache_misses} made anew",
            f"blocks recomputed in planned steps: {share:.1%} of runs, "
            f"taking about {self.recompute_share:.1%} of these steps' time",
            f"peak {text_of(self.peak_bytes)} in use, {text_of(self.peak_held_bytes)} held"
            + (f", budget {text_of(self.budget_bytes)}" if self.budget_bytes else "")
            + (": OVER" if self.budget_bytes and self.peak_held_bytes > self.budget_bytes else ""),
        ]
        if self.recoveries:
            lines.append(
                f"memory ran out {_times(self.recoveries)}, and what had failed was run again"
            )
        if self.reserve_bytes is not None:
            lines.append(f"reserve {text_of(self.reserve_bytes)}, {_margin(self.margin)}")
        if self.prediction_error is not None:
            lines.append(f"prediction error (leave one out): {self.prediction_error:.2%}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return stats_html(self)


_REMEDY = "raise the budget, shorten the batch, or name smaller blocks (blocks=)"


def _margin(margin: float) -> str:
    """What is learned from real peaks, in words."""
    if round(margin, 4) < 0:
        return f"predictions taken for {-margin:.2%} too high, as peaks have shown"
    return f"margin {abs(margin):.2%}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@dataclass(frozen=True, slots=True)
class Floor:
    """What is known of a model without training it; the budget only where it is not relative."""

    budget_bytes: int | None
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a batch of this size gets this plan."""

    size: InputSize
    """The size that is explained."""
    blocks: tuple[str, ...]
    """The names of the blocks."""
    budget_bytes: int | None = None
    """The budget; None before a relative one is settled."""
    reserve_bytes: int = 0
    """The part of it that plans leave free."""
    base_bytes: int = 0
    """In use when the first block starts: parameters, gradients, optimizer state, inputs."""
    parameter_bytes: int = 0
    """What the parameters take."""
    gradient_bytes: int = 0
    """What the gradients take, all told."""
    profile: Profile | None = None
    """What each run of a block costs at this size; None if nothing is known."""
    plan: Plan | None = None
    """Which runs are kept and which recomputed; None if nothing is known."""
    peak_kept_bytes: int | None = None
    """The peak if all were kept."""
    peak_recomputed_bytes: int | None = None
    """The peak if all were recomputed."""
    at_most_as: InputSize | None = None
    """If costs and peaks are upper bounds: the size whose figures they are. None if predicted."""
    note: str = ""
    """What should be known before all else: that mimose is off, say."""
    largest_batch: int | None = None
    """About the largest batch of this shape that would fit, with every block recomputed."""

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The peak under the plan."""
        return None if self.plan is None else self.base_bytes + self.plan.peak_bytes

    @property
    def bound_in_words(self) -> str:
        """Where upper bounds come from; nothing for predictions."""
        if self.at_most_as is None:
            return ""
        if self.at_most_as == self.size:
            return "from steps that treat gradients otherwise"
        return f"as at {self.at_most_as}: too few sizes were observed to predict this one"

    def __str__(self) -> str:
        lines = [f"input {self.size}", *([self.note] if self.note else [])]
        if self.budget_bytes is not None:
            lines.append(
                f"budget {text_of(self.budget_bytes)}, of which {text_of(self.reserve_bytes)} "
                "in reserve"
            )
        floor = f"parameters {text_of(self.parameter_bytes)}"
        if self.base_bytes:
            other = max(0, self.base_bytes - self.parameter_bytes)
            floor = (
                f"in use at the start: {text_of(self.base_bytes)} ({floor}, optimizer state and "
                f"other {text_of(other)})"
            )
        lines.append(f"{floor}; gradients take {text_of(self.gradient_bytes)}")
        if self.profile is None or self.plan is None:
            if not self.note:
                lines.append(
                    "nothing is known of this size yet: such a step is observed, with blocks "
                    "recomputed"
                )
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
            verdict = "it may not fit"
        lines = [
            *([f"upper bounds, {self.bound_in_words}:"] if bound else []),
            f"all kept would peak at {'most at ' * bound}{text_of(self.peak_kept_bytes)}, all "
            f"recomputed at {text_of(self.peak_recomputed_bytes)}; this plan at "
            f"{text_of(self.base_bytes + plan.peak_bytes)}: {verdict}",
            f"plan {plan}: {plan.kept} of {len(plan.recompute)} kept, "
            f"{plan.recompute_seconds * 1e3:.1f} ms of recomputing",
        ]
        lines += _block_lines(self.blocks, profile, plan)
        if self.largest_batch and not bound:
            still = "still " if plan.fits else ""
            lines.append(
                f"a batch of about {self.largest_batch} of this shape would {still}fit, with every "
                "block recomputed"
            )
        return lines


def _block_lines(blocks: Sequence[str], profile: Profile, plan: Plan) -> Iterator[str]:
    """What each block does and costs; neighbours that are alike share a line."""
    told = [
        ("fixed" if run.fixed else "recompute" if again else "keep", _cost(run))
        for run, again in zip(profile.runs, plan.recompute, strict=True)
    ]
    for (does, cost), group in groupby(zip(blocks, told, strict=False), key=lambda pair: pair[1]):
        names = [name for name, _ in group]
        of = (
            names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} blocks, each)"
        )
        yield f"  {does:9}  {of}: {cost}"


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
    """Put together what is known of a size."""
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
    cost_model, missing = _coming_kind(cost_model, setting)
    estimate, pattern = cost_model.estimate(size), cost_model.pattern_for(size)
    if estimate is None or pattern is None:
        return Explanation(**common)
    profile = estimate.profile
    if profile.prelude and setting.open:
        common["base_bytes"] = base_bytes = setting.meter.read().in_use + profile.prelude
    profile = profile.in_step(*cost_model.in_step(pattern, missing))
    available = int(setting.available(base_bytes) / (1 + cost_model.prediction_margin.margin))
    strictest = RecomputeAll().plan(profile, available)
    common["blocks"] = tuple(blocks[index] for index, _ in pattern)
    return Explanation(
        **common,
        profile=profile,
        plan=planner.plan(profile, available),
        peak_kept_bytes=base_bytes + KeepAll().plan(profile, available).peak_bytes,
        peak_recomputed_bytes=base_bytes + strictest.peak_bytes,
        at_most_as=estimate.at_most_as,
        largest_batch=_largest_batch(size, strictest, available),
    )


def _coming_kind(cost_model: CostModel, setting: Setting) -> tuple[CostModel, int]:
    """What is known of the kind of step that comes next, and which gradients will be born in it.

    Once detached nobody looks at the gradients any more: then that of the last step.
    """
    if not setting.open:
        return cost_model, setting.gradient_bytes if cost_model.born else 0
    now = setting.gradients.missing()
    kind = cost_model.of(born=setting.gradients.to_be_born(now))
    return kind, setting.gradients.missing_bytes(now)


def _largest_batch(size: InputSize, strictest: Plan, available: int) -> int | None:
    """Scaled in proportion: a little low, since a part of the peak does not grow with the batch."""
    if not size.layout[0][1] or strictest.peak_bytes <= 0:
        return None
    return max(0, int(size.dims[0] * available / strictest.peak_bytes))
