"""Predictions for a recorded model at any input size and under any budget, without training.

Profiles come from the observations in a recording, plans from the planner, peaks from the timeline.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from mimose.costs import InputSize, Link, Option, Profile, extra_nanoseconds
from mimose.estimation import CostModel, Prediction
from mimose.planning import (
    Greedy,
    GreedyLiteral,
    KeepAll,
    Plan,
    Planner,
    RecomputeAll,
    planner_named,
    strictest,
)
from mimose.reporting.reader import RecordedStep, Recording

_WARM_UP = 2
"""The first steps, whose times are not representative."""
_WITHOUT_HOST = (Greedy, GreedyLiteral, KeepAll, RecomputeAll)
"""Planners that never use host memory, so that their profiles need no link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The learned costs of a model, and the memory and time of the run that they come from."""

    cost_model: CostModel
    planner: Planner
    floor_bytes: int
    """Memory in use before a step: parameters, optimizer state, gradients that are not freed."""
    missing_bytes: int
    """Gradients that are allocated in every step."""
    reserve_share: float
    """The share of a budget that plans leave free."""
    step_time: StepTime | None = None
    budget_bytes: int | None = None
    """The budget of the run."""
    link: Link | None = None
    """The link to host memory; None if plans do without."""

    @classmethod
    def of(cls, recording: Recording, planner: Planner | None = None) -> Outlook:
        """The outlook of a recorded run."""
        last = recording.observations[-1] if recording.observations else None
        allocates = last is not None and bool(last.all_gradients_allocated)
        cost_model = recording.cost_model()
        reserve = recording.steps[-1].reserve_bytes if recording.steps else 0
        outlook = cls(
            cost_model=cost_model,
            planner=planner or _planner_of(recording),
            floor_bytes=_bytes_before_step(recording, cost_model),
            missing_bytes=recording.header.gradient_bytes if allocates else 0,
            reserve_share=reserve / recording.header.budget_bytes,
            budget_bytes=recording.header.budget_bytes,
            link=recording.link,
        )
        return replace(outlook, step_time=StepTime.of(outlook, recording.steps))

    def profile(self, size: InputSize) -> Profile | None:
        """The predicted costs of this size; None if they cannot be predicted."""
        prediction = self.predict(size)
        return None if prediction is None or prediction.bound_of else prediction.profile

    def predict(self, size: InputSize) -> Prediction | None:
        """The predicted costs or, failing that, an upper bound; None if there is neither."""
        return self._in_typical_step(self.cost_model.predict(size), size)

    def extrapolate(self, size: InputSize) -> Prediction | None:
        """The predicted costs, extrapolated for sizes larger than any that was observed."""
        prediction = self.predict(size)
        if prediction is not None and prediction.bound_of is None:
            return prediction
        if not self.cost_model.exceeds_observed(size):
            return None
        return self._in_typical_step(self.cost_model.extrapolate(size), size)

    def _in_typical_step(self, prediction: Prediction | None, size: InputSize) -> Prediction | None:
        """The prediction with the gradients that a typical step allocates, and with the link."""
        if prediction is None:
            return None
        conditions = self.cost_model.conditions(prediction.pattern, self.missing_bytes)
        profile = replace(prediction.profile, link=self._link_for(size))
        return replace(prediction, profile=profile.in_step(conditions))

    def _link_for(self, size: InputSize) -> Link | None:
        """The link that a step of this size can use."""
        irregular = not self.cost_model.regular or len(size.passes) > 1
        return None if irregular or isinstance(self.planner, _WITHOUT_HOST) else self.link

    def base_bytes(self, profile: Profile) -> int:
        """Memory in use when the first block starts."""
        return self.floor_bytes + (profile.prelude or 0)

    def available(self, profile: Profile, budget_bytes: int) -> int:
        """Memory that a step may use on top of `base_bytes`."""
        reserve = int(self.reserve_share * budget_bytes)
        return budget_bytes - reserve - self.base_bytes(profile)

    def plan(self, profile: Profile, budget_bytes: int) -> Plan:
        """The plan for a batch of this size."""
        return self.planner.plan(profile, self.available(profile, budget_bytes))

    def budget_for(self, profile: Profile, plan: Plan) -> int:
        """The smallest budget that fits this plan."""
        need = self.base_bytes(profile) + plan.peak_bytes
        return int(need / (1 - self.reserve_share)) + 1

    def least_budget(self, profile: Profile) -> int:
        """The smallest budget for this size: everything is recomputed, with inputs on the host
        where there is a link."""
        return self.budget_for(profile, strictest(profile, 0))

    def easy_budget(self, profile: Profile) -> int:
        """The smallest budget under which every run of this size is kept."""
        return self.budget_for(profile, KeepAll().plan(profile, 0))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step without recompute, linear in the time to recompute every run."""

    base_seconds: float
    slope: float

    @classmethod
    def of(cls, outlook: Outlook, steps: Sequence[RecordedStep]) -> StepTime | None:
        """Fit to the recorded steps, without those that contain a pause, such as an evaluation."""
        points = [p for p in _time_points(outlook, steps) if p is not None][_WARM_UP:]
        if len(points) < 3:
            return None
        whole, plain = np.array(points).T
        ratio = plain / np.maximum(whole, 1e-9)
        regular = ratio <= 3 * np.median(ratio)
        if regular.sum() < 3 or len(set(whole[regular])) < 2:
            return cls(float(np.median(plain)), 0.0)
        slope, base = np.polyfit(whole[regular], plain[regular], 1)
        if slope < 0 or base < 0:
            return cls(0.0, float(np.median(plain[regular] / whole[regular])))
        return cls(float(base), float(slope))

    def seconds(self, profile: Profile) -> float:
        """Time of a step of this size in which nothing is recomputed."""
        return self.base_seconds + self.slope * whole_seconds(profile)


def whole_seconds(profile: Profile) -> float:
    """Time to recompute every run."""
    return extra_nanoseconds(profile, [Option.RECOMPUTE] * len(profile.runs)) / 1e9


def _time_points(
    outlook: Outlook, steps: Sequence[RecordedStep]
) -> Iterable[tuple[float, float] | None]:
    """For each step: the time to recompute every run, and the step's time without recompute."""
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
        unplanned = step.plan is None and step.observed is None
        recompute = whole if unplanned else step.recompute_milliseconds / 1e3
        yield whole, max(took - recompute, 0.0)


def _bytes_before_step(recording: Recording, cost_model: CostModel) -> int:
    """Median memory in use before a step, over the second half of the run."""
    bases = []
    for step in recording.steps[len(recording.steps) // 2 :]:
        prediction = cost_model.predict(step.size)
        if prediction is not None:
            bases.append(step.base_bytes - (prediction.profile.prelude or 0))
    return int(statistics.median(bases)) if bases else recording.header.parameter_bytes


def _planner_of(recording: Recording) -> Planner:
    try:
        return planner_named(recording.header.planner)
    except ValueError:  # a user-defined planner
        return planner_named("optimal")
