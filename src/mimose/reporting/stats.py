"""Statistics of a run, as a value. `running_stats.py` counts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mimose.costs import InputSize
from mimose.planning import Plan
from mimose.reporting.notebook import stats_html
from mimose.units import text_of


@dataclass(slots=True, kw_only=True)
class LastStep:
    """The last step of a run."""

    size: InputSize | None = None
    plan: Plan | None = None
    base_bytes: int = 0
    predicted_peak_bytes: int | None = None
    real_peak_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class Times:
    """Where the time of a run went."""

    seconds: float = 0.0
    planned_seconds: float = 0.0
    recompute_seconds: float = 0.0
    planning_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStats:
    """What a run has done with host memory."""

    moved_bytes: int = 0
    held_bytes: int = 0
    stalled_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Shortages:
    """What was done because memory ran short."""

    evictions: int = 0
    recoveries: int = 0
    retries: int = 0


@dataclass(slots=True)
class Stats:
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
    worst_shortfall: float = 0.0
    """The largest underestimate of a peak, as a share of the real peak."""
    runs_kept: int = 0
    """Runs of blocks that kept their activations, in planned steps."""
    runs_recomputed: int = 0
    """Runs of blocks that were recomputed, in planned steps."""
    shortages: Shortages = field(default_factory=Shortages)
    """`evictions`, `recoveries` and `retries` in one value."""
    host: HostStats = HostStats()
    """`moved_bytes`, `host_bytes_held` and `stalled_seconds` in one value."""
    times: Times = field(default_factory=Times)
    """`seconds`, `planned_seconds`, `recompute_seconds` and `planning_seconds` in one value."""
    last_step: LastStep = field(default_factory=LastStep)
    """All `last_…` attributes in one value."""

    @property
    def seconds(self) -> float:
        """From the start of the first step to the start of the last one."""
        return self.times.seconds

    @property
    def planned_seconds(self) -> float:
        """Time of planned steps, each until the start of the next one, without pauses."""
        return self.times.planned_seconds

    @property
    def recompute_seconds(self) -> float:
        """Predicted time of recomputing in planned steps."""
        return self.times.recompute_seconds

    @property
    def planning_seconds(self) -> float:
        """Time spent on choosing plans in all steps, without reading memory statistics."""
        return self.times.planning_seconds

    @property
    def recompute_share(self) -> float:
        """Share of the planned steps' time that was spent on recomputing."""
        if not self.planned_seconds:
            return 0.0
        return min(1.0, self.recompute_seconds / self.planned_seconds)

    @property
    def evictions(self) -> int:
        """Kept runs whose activations were evicted because memory ran short."""
        return self.shortages.evictions

    @property
    def recoveries(self) -> int:
        """How often memory ran out and a block (or, with `retry`, a step) was run again."""
        return self.shortages.recoveries

    @property
    def retries(self) -> int:
        """How often a whole step was run again by `retry`; the other recoveries are of blocks."""
        return self.shortages.retries

    @property
    def moved_bytes(self) -> int:
        """Bytes of activations that have left the device for the host so far."""
        return self.host.moved_bytes

    @property
    def host_bytes_held(self) -> int:
        """Host memory that is held for activations."""
        return self.host.held_bytes

    @property
    def stalled_seconds(self) -> float:
        """Time that the device has waited for copies to or from the host."""
        return self.host.stalled_seconds

    @property
    def last_size(self) -> InputSize | None:
        """Input size of the last step."""
        return self.last_step.size

    @property
    def last_plan(self) -> Plan | None:
        """Plan of the last step; None if it was observed."""
        return self.last_step.plan

    @property
    def last_base_bytes(self) -> int:
        """Memory in use when the first block of the last step started."""
        return self.last_step.base_bytes

    @property
    def last_predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the last step; None if it was observed or only had an upper bound."""
        return self.last_step.predicted_peak_bytes

    @property
    def last_real_peak_bytes(self) -> int | None:
        """Real peak of the last step; None if it could not be measured."""
        return self.last_step.real_peak_bytes

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return stats_html(self)

    def _lines(self) -> Iterator[str]:
        unfinished = self.steps - self.observed_steps - self.planned_steps
        yield (
            f"{_steps(self.steps)}: {self.observed_steps} observed, {self.planned_steps} planned"
            + (f", {unfinished} not finished" if unfinished else "")
        )
        if not self.steps:
            return
        yield f"plans: {self.cache_hits} from the cache, {self.cache_misses} new"
        runs = self.runs_kept + self.runs_recomputed
        if runs:
            yield (
                f"recomputed in planned steps: {self.runs_recomputed / runs:.1%} of block runs, "
                f"about {self.recompute_share:.1%} of the time"
            )
        yield self._peak_line()
        if self.moved_bytes:
            yield (
                f"moved to the host: {text_of(self.moved_bytes)}, {text_of(self.host_bytes_held)} "
                f"held there; {self.stalled_seconds * 1e3:.1f} ms of waiting for transfers"
            )
        if self.recoveries:
            rerun = self.recoveries - self.retries
            yield (
                f"ran out of memory {_times(self.recoveries)}: {_runs(rerun)} recomputed instead "
                f"of kept, {_steps(self.retries)} retried"
            )
        if self.evictions:
            yield f"memory ran short: evicted the kept activations of {_runs(self.evictions)}"
        if self.reserve_bytes is not None:
            yield f"reserve {text_of(self.reserve_bytes)}, uncertainty {self.uncertainty:.2%}"
        if self.prediction_error is not None:
            yield f"prediction error (leave-one-out): {self.prediction_error:.2%}"

    def _peak_line(self) -> str:
        held = text_of(self.peak_held_bytes)
        line = f"peak {text_of(self.peak_bytes)} in use, {held} held by the allocator"
        if not self.budget_bytes:
            return line
        over = ": OVER" if self.peak_held_bytes > self.budget_bytes else ""
        return f"{line}, budget {text_of(self.budget_bytes)}{over}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _runs(count: int) -> str:
    return "1 block run" if count == 1 else f"{count} block runs"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
