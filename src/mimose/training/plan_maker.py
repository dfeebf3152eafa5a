"""Make the plan for a step that the cache has none for.

What is predicted for its size is put under the step's conditions: the gradients that do not exist
yet, what other steps take meanwhile, the link to the host. The planner then chooses.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from mimose.costs import Option, Profile, Run
from mimose.estimation import CostModel, Prediction, State
from mimose.planning import CachedPlan, KeepAll, Optimal, Plan, PlanCache, Planner, strictest
from mimose.training.decision import AS_PLANNED, EVERYTHING, PlanKey
from mimose.training.host_use import HostUse
from mimose.training.setting import Setting

_GUARDED = 0.12
"""The share of the budget below the limit in which a kept run is guarded."""
_LESS = 64
"""A plan is also used where less is available, by at most this fraction."""
_SURE = 0.66
"""The share of what is available that a step may be predicted to take, and will not run short of
memory whatever is in its batch: of 1,935 steps on a CPU whose memory depended on content, none took
more than 1.28 times what was expected for its size."""


class PlanMaker:
    """Makes plans with one planner, and puts them into a cache."""

    def __init__(self, planner: Planner, cache: PlanCache) -> None:
        self._planner = planner
        self._cache = cache

    def new(self, setting: Setting, cost_model: CostModel, key: PlanKey) -> CachedPlan | None:
        """A plan for a whole step; None if nothing tells what its size costs."""
        prediction = cost_model.for_planning(key.size)
        if prediction is None:
            return None
        profile = _profile_of(prediction, setting, cost_model, key)
        if _leaves_it_to_eviction(key, prediction, profile):
            plan = KeepAll().plan(profile, key.available_bytes)
            return self._ready(setting, plan, profile, key, prediction)
        if cost_model.regular and _may_use_host(setting.host, key, profile):
            profile = setting.host.connected(profile, trusted=prediction.trusted)
            key = key._replace(link=setting.host.version)  # the first to ask has measured it
        plan = self._plan(profile, key, prediction)
        if not setting.host.has(plan.host_bytes):
            profile, plan = self._meanwhile(setting, plan, profile, key, prediction)
        return self._ready(setting, plan, profile, key, prediction)

    def rest(
        self, setting: Setting, cost_model: CostModel, key: PlanKey, former: Plan
    ) -> CachedPlan | None:
        """A plan for a step whose first runs are done (`key.done`), now that its next pass is
        known; None if the former plan had better stay."""
        prediction = cost_model.predict(key.size)
        if prediction is None or prediction.bound_of is not None:
            return None
        profile = _profile_of(prediction, setting, cost_model, key)
        if len(profile.runs) != len(former.choices):
            return None
        choices = self._choices_for_rest(profile, key.done, _room(key, prediction))
        plan = Plan.of(profile, choices, key.available_bytes)
        if cost_model.exceeds_observed(key.size) and not plan.fits:
            return None
        return self._ready(setting, plan, profile, key, prediction)

    def _choices_for_rest(
        self, profile: Profile, done: tuple[Option, ...], available: int
    ) -> tuple[Option, ...]:
        """All choices, those for runs that are still to come made anew."""
        if not isinstance(self._planner, Optimal):
            return (*done, *self._planner.plan(profile, available).choices[len(done) :])
        before, rest = profile.runs[: len(done)], profile.runs[len(done) :]
        if not rest:
            return done
        held = sum(
            run.menu[0].backward_held
            for run, option in zip(before, done, strict=True)
            if not option.recomputes
        )
        base = sum(run.boundary for run in before)
        first = rest[0]._replace(boundary=base + rest[0].boundary)
        profile = replace(profile, runs=(first, *rest[1:]), tail=0)
        return (*done, *self._planner.plan(profile, available - held).choices)

    def _meanwhile(
        self, setting: Setting, wanted: Plan, profile: Profile, key: PlanKey, prediction: Prediction
    ) -> tuple[Profile, Plan]:
        """A plan that makes do with the host memory that is there, while more is being pinned.

        If nothing fits without more of it, the step waits.
        """
        less = replace(profile, link=setting.host.only_what_is_there(profile.link))
        plan = self._plan(less, key, prediction)
        if wanted.fits and not plan.fits and setting.host.reserve(wanted.host_bytes):
            return profile, wanted
        return less, plan

    def _plan(self, profile: Profile, key: PlanKey, prediction: Prediction) -> Plan:
        plan = self._planner.plan(profile, _room(key, prediction))
        if key.strictness == AS_PLANNED:
            return plan
        strict = strictest(profile, key.available_bytes)
        if key.strictness == EVERYTHING:
            return strict
        halfway = (strict.peak_bytes + plan.peak_bytes) // 2
        return Optimal().plan(profile, min(key.available_bytes, halfway))

    def _ready(
        self, setting: Setting, plan: Plan, profile: Profile, key: PlanKey, prediction: Prediction
    ) -> CachedPlan:
        key = key._replace(planner=self._planner.version)  # this plan may have changed it
        guarded_bytes = int(_GUARDED * setting.budget_bytes) - setting.reserve.bytes
        near_bytes = key.available_bytes - guarded_bytes
        cached = CachedPlan.of(
            plan,
            prediction.pattern,
            profile,
            near_bytes,
            exact=prediction.bound_of in (None, key.size),
            state=prediction.state,
            serves=_served(plan, profile, key, prediction, near_bytes),
            evictable=_evictable(plan, profile, key, prediction),
        )
        self._cache.put(key.conditions, cached)
        return cached


def _profile_of(
    prediction: Prediction, setting: Setting, cost_model: CostModel, key: PlanKey
) -> Profile:
    """The predicted costs under the conditions of the coming step."""
    missing = setting.gradients.bytes_to_allocate(key.missing)
    return prediction.profile_as_run.in_step(
        cost_model.conditions(prediction.pattern, missing, key.previous_bytes, key.beside_bytes)
    )


def _leaves_it_to_eviction(key: PlanKey, prediction: Prediction, profile: Profile) -> bool:
    """Whether everything is kept until memory runs short: where memory depends on more than the
    size, what a batch takes shows while it runs, and evicting costs what planning would."""
    if not key.may_evict or prediction.state is not State.SUSPECT:
        return False
    return key.strictness == AS_PLANNED and strictest(profile, key.available_bytes).fits


def _evictable(
    plan: Plan, profile: Profile, key: PlanKey, prediction: Prediction
) -> frozenset[Run]:
    """The kept runs that a plan for two thirds of what is available would recompute.

    If a step takes more memory than predicted, evicting these makes it fit. Others are kept as in
    plain training, which costs nothing.
    """
    if not key.may_evict or prediction.trusted:
        return frozenset()
    tight = Optimal().plan(replace(profile, link=None), int(_SURE * key.available_bytes))
    choices = zip(prediction.pattern, plan.choices, tight.choices, strict=True)
    return frozenset(
        run for run, option, less in choices if option is Option.KEEP and less.recomputes
    )


def _may_use_host(host: HostUse, key: PlanKey, profile: Profile) -> bool:
    """Whether bytes may leave the device: not where a step of another handle or a second pass comes
    in between.

    Before the first plan that could use it, nothing is done for it.
    """
    alone = not key.beside_bytes and len(key.size.passes) == 1
    if not (host.possible and alone):
        return False
    if host.memory is None and KeepAll().plan(profile, key.available_bytes).fits:
        return False
    return host.serves(profile, key.available_bytes)


def _served(
    plan: Plan, profile: Profile, key: PlanKey, prediction: Prediction, near_bytes: int
) -> range:
    """The available bytes for which this plan is the one to use.

    Where a plan fits that was made for more, no other takes less time. It is used for little less
    than it was made for, since which runs are guarded depends on what is available. If it does not
    fit although it could take less memory, it is used for nothing else: where less is available,
    some planners find a plan that fits.
    """
    most = key.available_bytes
    least = most - most // _LESS
    if plan.fits:
        least = max(least, int(plan.peak_bytes * (1 + prediction.uncertainty)) + 1)
    elif plan.peak_bytes > strictest(profile, most).peak_bytes:
        least = most
    if plan.keeps_all and plan.peak_bytes <= near_bytes:
        return range(min(least, most), sys.maxsize)
    return range(min(least, most), most + 1)


def _room(key: PlanKey, prediction: Prediction) -> int:
    """What is left of the available bytes for a plan, if its peak may be so far off."""
    return int(key.available_bytes / (1 + prediction.uncertainty))
