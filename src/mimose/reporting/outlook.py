"""What a model would need at any size under any budget, from what was learned of it.

Nothing here trains: profiles come from what a recording has learned, plans from the planner, peaks
from the timeline. So questions can be asked that nobody has run: another budget, other lengths.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from mimose.costs import InputSize, Profile, recompute_nanoseconds
from mimose.estimation import CostModel, Estimate
from mimose.planning import Plan, Planner, planner_named
from mimose.reporting.reader import RecordedStep, Recording

_WARM_UP = 2
"""Steps whose time says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A model on paper: what is known of it, and of the run it is in."""

    cost_model: CostModel
    planner: Planner
    floor_bytes: int
    """In use before a step: parameters, optimizer state, gradients that stay."""
    missing_bytes: int
    """Gradients that come into being in every step."""
    reserve_share: float
    """The part of a budget that plans leave free."""
    step_time: StepTime | None = None
    budget_bytes: int | None = None
    """The budget that the run had."""

    @classmethod
    def of(cls, recording: Recording, planner: Planner | None = None) -> Outlook:
        """The outlook of a recorded run."""
        last = recording.observations[-1] if recording.observations else None
        born = last is not None and last.gradients_born
        cost_model = recording.cost_model().of(born=born)
        reserve = recording.steps[-1].reserve_bytes if recording.steps else 0
        outlook = cls(
            cost_model=cost_model,
            planner=planner or _planner_of(recording),
            floor_bytes=_floor(recording, cost_model),
            missing_bytes=recording.header.gradient_bytes if born else 0,
            reserve_share=reserve / recording.header.budget_bytes,
            budget_bytes=recording.header.budget_bytes,
        )
        return outlook.timed_by(recording)

    def timed_by(self, recording: Recording) -> Outlook:
        """The same, with the time of a step as this run had it."""
        return replace(self, step_time=StepTime.of(self, recording.steps))

    def profile(self, size: InputSize) -> Profile | None:
        """What every run costs at this size, in a usual step; None where it cannot be predicted."""
        estimate = self.estimate(size)
        return None if estimate is None or estimate.at_most_as else estimate.profile

    def estimate(self, size: InputSize) -> Estimate | None:
        """The same or, failing that, an upper bound; None where nothing is known."""
        return self._usual(self.cost_model.estimate(size), size)

    def extrapolate(self, size: InputSize) -> Estimate | None:
        """The same where it can be predicted; beyond the sizes seen what can be expected."""
        estimate = self.estimate(size)
        if estimate is not None and estimate.at_most_as is None:
            return estimate
        if not self.cost_model.beyond(size):
            return None
        return self._usual(self.cost_model.extrapolate(size), size)

    def _usual(self, estimate: Estimate | None, size: InputSize) -> Estimate | None:
        """An estimate of a size, in a usual step."""
        pattern = self.cost_model.pattern_for(size)
        if estimate is None or pattern is None:
            return None
        in_step = self.cost_model.in_step(pattern, self.missing_bytes)
        return replace(estimate, profile=estimate.profile.in_step(*in_step))

    def base_bytes(self, profile: Profile) -> int:
        """In use when the first block starts."""
        return self.floor_bytes + profile.prelude

    def available(self, profile: Profile, budget_bytes: int) -> int:
        """What a step of this size may take beyond that."""
        reserve = int(self.reserve_share * budget_bytes)
        return budget_bytes - reserve - self.base_bytes(profile)

    def plan(self, profile: Profile, budget_bytes: int) -> Plan:
        """The plan that a batch of this size would get."""
        return self.planner.plan(profile, self.available(profile, budget_bytes))

    def budget_for(self, profile: Profile, recompute: Sequence[bool]) -> int:
        """The least budget under which this size fits if these runs are recomputed."""
        need = self.base_bytes(profile) + Plan.of(profile, tuple(recompute), 0).peak_bytes
        return int(need / (1 - self.reserve_share)) + 1

    def least_budget(self, profile: Profile) -> int:
        """The budget below which nothing helps a batch of this size."""
        return self.budget_for(profile, [True] * len(profile.runs))

    def easy_budget(self, profile: Profile) -> int:
        """The budget from which everything is kept at this size."""
        return self.budget_for(profile, [False] * len(profile.runs))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step without recomputing: a line in what one whole recompute would take."""

    base_seconds: float
    slope: float

    @classmethod
    def of(cls, outlook: Outlook, steps: Sequence[RecordedStep]) -> StepTime | None:
        """Fitted to the recorded steps; pauses (an evaluation, a checkpoint) are left out."""
        points = [p for p in _time_points(outlook, steps) if p is not None][_WARM_UP:]
        if len(points) < 3:
            return None
        whole, rest = np.array(points).T
        usual = rest <= 3 * np.median(rest / np.maximum(whole, 1e-9)) * np.maximum(whole, 1e-9)
        if usual.sum() < 3 or len(set(whole[usual])) < 2:
            return cls(float(np.median(rest)), 0.0)
        slope, base = np.polyfit(whole[usual], rest[usual], 1)
        if slope < 0 or base < 0:
            return cls(0.0, float(np.median(rest[usual] / whole[usual])))
        return cls(float(base), float(slope))

    def seconds(self, profile: Profile) -> float:
        """A step of this size, nothing recomputed."""
        return self.base_seconds + self.slope * whole_seconds(profile)


def whole_seconds(profile: Profile) -> float:
    """What recomputing every run takes."""
    return recompute_nanoseconds(profile, [True] * len(profile.runs)) / 1e9


def _time_points(
    outlook: Outlook, steps: Sequence[RecordedStep]
) -> Iterable[tuple[float, float] | None]:
    known: dict[InputSize, float | None] = {}
    for step, following in zip_longest(steps, steps[1:]):
        if step.size not in known:
            profile = outlook.profile(step.size)
            known[step.size] = None if profile is None else whole_seconds(profile)
        whole = known[step.size]
        if whole is None:
            yield None
            continue
        took = step.milliseconds / 1e3
        if following is not None:
            took = max(took, following.at_seconds - step.at_seconds)
        again = whole if step.plan is None else step.recompute_milliseconds / 1e3
        yield whole, max(took - again, 0.0)


def _floor(recording: Recording, cost_model: CostModel) -> int:
    """The memory in use before a step, as the later half of the run has it."""
    bases = []
    for step in recording.steps[len(recording.steps) // 2 :]:
        profile = cost_model.predict(step.size) or cost_model.other.predict(step.size)
        if profile is not None:
            bases.append(step.base_bytes - profile.prelude)
    return int(statistics.median(bases)) if bases else recording.header.parameter_bytes


def _planner_of(recording: Recording) -> Planner:
    try:
        return planner_named(recording.header.planner)
    except ValueError:  # somebody's own
        return planner_named("optimal")
