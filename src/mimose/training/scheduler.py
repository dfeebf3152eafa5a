"""From a batch's size and the memory in use to a plan, and what steps teach about that.

The paper's scheduler with its plan cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mimose.costs import InputSize, InStep, Pattern, Profile, Regime, StepObservation
from mimose.estimation import CostModel, CostModels, Estimate, Sample
from mimose.memory import Reading
from mimose.planning import (
    CachedPlan,
    Decision,
    Kind,
    Optimal,
    Plan,
    PlanCache,
    Planner,
    RecomputeAll,
    Terms,
)
from mimose.training.setting import Setting
from mimose.training.steps import PlannedStep, Step

log = logging.getLogger("mimose")

_MOST_SURPRISES = 16
"""How often a block that no plan knew, or a doubt, makes the next step an observed one."""
_PROBE_EVERY = 16
"""At least so many planned steps there are to one whose memory is compared with the timeline."""
_OVERDUE = 4 * _PROBE_EVERY
"""After how many the next one has to be."""
_AT_STAKE = 0.7
"""The share of the limit from which on a doubt matters even if nothing is recomputed."""
_GUARDED = 0.12
"""The share of the budget below the limit in which a kept run is guarded."""
_SPARE = 0.03
"""The share of the budget that is left free, beside the reserve, where a size is only guessed."""
_NEAR = 0.9
"""The share of what is available from which on a doubtful plan is watched."""

_NOWHERE = range(0)

AS_PLANNED, STRICTER, EVERYTHING = range(3)
"""How strict a plan must be: after a failure, halfway to everything, then everything."""


class Scheduler:
    """Decides what each step recomputes."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.cache = PlanCache()
        self.cost_model = self._planned_from = CostModel()
        """What is known in the present regime; and what the last plan came from."""
        self.strictness = AS_PLANNED
        self._cost_models = CostModels()
        self._surprises = 0
        self._look_at_all = False
        self._unwatched = 0
        self._shares = getattr(planner, "shares", False)
        self._samples = isinstance(planner, Optimal)

    def enter(self, regime: Regime) -> str | None:
        """A step runs in this regime; if it is a new one, what is different from the last one."""
        self.cost_model, change = self._cost_models.enter(regime)
        return change

    def forget(self) -> None:
        """Nothing that is known holds any longer."""
        self.cost_model = self._planned_from = CostModel()
        self._cost_models, self._surprises = CostModels(), 0
        self.cache.clear()

    @property
    def regime(self) -> Regime | None:
        """The present one; None before the first step."""
        return self._cost_models.present

    def _turn_to_kind(self, setting: Setting) -> tuple[bool, ...]:
        """Go by what is known of the kind of step that comes now; which gradients are missing."""
        missing = setting.gradients.missing()
        self.cost_model = self.cost_model.of(born=setting.gradients.to_be_born(missing))
        return missing

    def decide(
        self,
        setting: Setting,
        size: InputSize,
        reading: Reading,
        stale_bytes: int,
        broken: Step | None = None,
        beside_bytes: int = 0,
    ) -> Decision | None:
        """The plan for a step of this size, if enough is known of it.

        `broken` is the last step, if it never came to its end. Steps of other handles rise by
        `beside_bytes` while this one is open.
        """
        self._note_failures(setting, reading, broken)
        missing = self._turn_to_kind(setting)
        cost_model = self.cost_model
        shared, pattern = cost_model.sharing(size)
        look = cost_model.wants_to_look(size)
        if pattern is None or (look and self.strictness == AS_PLANNED):
            self._look_at_all |= look
            cost_model.look_in = None
            return self._unknown()
        available, least = self._available(setting, reading, stale_bytes)
        stale = least + setting.gradients.leaving_bytes(missing)
        habits = cost_model.born, bool(cost_model.retained), cost_model.later_bytes
        beside = setting.bracket(beside_bytes)[1] if beside_bytes else 0
        kind = Kind(missing, stale, habits, cost_model.mark, self.strictness, (), beside)
        overdue = self._unwatched >= _OVERDUE and not setting.meter.private
        cached, new = None if overdue else self.cache.get((shared, available, kind)), False
        if cached is None:
            in_step = self._in_step(setting, pattern, missing, stale, beside)
            terms = Terms(shared, available, kind, pattern, in_step, _guarded_bytes(setting))
            cached = self._shared(terms, own=overdue)
            if cached is None:
                cached, new = self._new(terms, size), True
            if cached is None:
                return self._unknown()
        self._planned_from = cost_model
        watched = self._watched(setting, cached, shared, available)
        return Decision(cached, available, watched, new, kind)

    def plan_rest(
        self, setting: Setting, size: InputSize, decision: Decision, done: tuple[bool, ...]
    ) -> CachedPlan | None:
        """The plan for a step whose first runs are `done`, now that its next pass is known.

        None if what was decided for the size that was expected had better stay.
        """
        if decision.kind is None or self.strictness != AS_PLANNED:
            return None
        kind = decision.kind._replace(done=done)
        cost_model, available = self.cost_model, decision.available_bytes
        cached = self.cache.get((size, available, kind))
        pattern = cost_model.pattern_for(size)
        if cached is not None or pattern is None:
            return cached
        beside = kind.stale_bytes, kind.beside_bytes
        in_step = self._in_step(setting, pattern, kind.missing, *beside)
        profile = self.predict(size, in_step)
        if profile is None or len(profile.runs) != len(decision.cached.plan.recompute):
            return None
        choices = (*done, *self._rest(profile, done, available))
        terms = Terms(size, available, kind, pattern, in_step, _guarded_bytes(setting))
        plan = Plan.of(profile, choices, available)
        if cost_model.beyond(size) and (cost_model.doubts_beyond or not plan.fits):
            return None
        cached = terms.ready(plan, profile, doubtful=cost_model.doubtful(size))
        self.cache.put(terms.key, cached)
        return cached

    def _rest(self, profile: Profile, done: tuple[bool, ...], available: int) -> tuple[bool, ...]:
        """Choices for the runs that are still to come."""
        if not self._samples:
            return self.planner.plan(profile, available).recompute[len(done) :]
        kept = sum(
            run.growth
            for run, again in zip(profile.runs, done, strict=False)
            if not (again or run.fixed)
        )
        rest = replace(profile, runs=profile.runs[len(done) :], tail=0)
        return self.planner.plan(rest, available - kept).recompute

    def _note_failures(self, setting: Setting, reading: Reading, broken: Step | None) -> None:
        kept = broken is None or broken.kept_anything
        if not setting.note_failures(reading, kept=kept):
            return
        if kept:
            self._planned_from.prediction_margin.ran_out()
        if broken is not None:
            self.failed(broken)

    def _shared(self, terms: Terms, *, own: bool) -> CachedPlan | None:
        """A plan that others have, too; with its `own` costs, if it must or theirs will not do."""
        if not self._shares:
            return None
        cached = self.cache.between(terms.kind, terms.size, terms.available_bytes)
        if cached is None:
            return None
        profile = self.predict(terms.size, terms.in_step) if own or not cached.exact else None
        plan = Plan.of(profile, cached.plan.recompute, terms.available_bytes) if profile else None
        if profile is None and not cached.exact and self.cost_model.curious(terms.size):
            return None  # it may be better to observe
        doubtful = cached.doubtful and self.cost_model.doubtful(terms.size)  # not for others' sake
        if plan is not None and plan.fits:  # for others to go by
            cached = terms.ready(plan, profile, doubtful=doubtful)
            self.cache.shelve(terms.kind, terms.shelved(cached))
        else:  # what is guarded depends on what is available now
            ready = terms.ready(cached.plan, cached.profile)
            cached = replace(cached, guarded=ready.guarded, doubtful=doubtful)
        self.cache.put(terms.key, cached, new=False)
        return cached

    def _new(self, terms: Terms, real: InputSize) -> CachedPlan | None:
        """A new plan, ready for use and for sizes to share; None if it is better to observe."""
        made = self.new_plan(terms.size, terms.available_bytes, terms.in_step, real=real)
        if made is None:
            return None
        plan, estimate = made
        cached = terms.ready(plan, estimate.profile, doubtful=self.cost_model.doubtful(real))
        cached = replace(cached, exact=estimate.at_most_as is None)
        self.cache.put(terms.key, cached)
        if self._shares:
            self.cache.shelve(terms.kind, terms.shelved(cached))
        return cached

    def _available(self, setting: Setting, reading: Reading, stale_bytes: int) -> tuple[int, int]:
        """What the step may rise by, and how much of what is stale is given back in its backward.

        What is stale takes from the forward: the most that it may be is taken, the least given
        back.
        """
        available = setting.available(reading.in_use)
        margin = self.cost_model.prediction_margin.margin
        if margin:
            available = int(available / (1 + margin))
        if not stale_bytes:
            return setting.rounded(available), 0
        least, most = setting.bracket(stale_bytes)
        return setting.rounded(available + stale_bytes) - most, least

    def _in_step(
        self,
        setting: Setting,
        pattern: Pattern,
        missing: tuple[bool, ...],
        stale_bytes: int,
        beside_bytes: int = 0,
    ) -> InStep:
        """What happens in the coming step besides its size."""
        leaving = setting.gradients.leaving_bytes(missing)
        missing_bytes = setting.gradients.missing_bytes(missing) + leaving
        return self.cost_model.in_step(pattern, missing_bytes, stale_bytes, beside_bytes)

    def sample(
        self, setting: Setting, size: InputSize, reading: Reading, stale_bytes: int
    ) -> Sample | None:
        """What to keep in a step that is observed, where some runs tell of others.

        Not after a failure or in doubt: then everything is looked at. Nor where the planner has a
        mind of its own about what to keep, or what is kept outlives the backward.
        """
        in_doubt = self._look_at_all or self.cost_model.prediction_margin.in_doubt
        in_doubt |= bool(self.cost_model.retained)
        self._look_at_all = False
        missing = self._turn_to_kind(setting)
        similar = self.cost_model.similar_for(size)
        if similar is None or in_doubt or self.strictness != AS_PLANNED or not self._samples:
            return None
        available, least = self._available(setting, reading, stale_bytes)
        stale = least + setting.gradients.leaving_bytes(missing)
        in_step = self._in_step(setting, similar.seen.pattern, missing, stale)
        available -= int(_SPARE * setting.budget_bytes)
        seen = self.cost_model.seen_like(size)
        return similar.sample(size, seen, in_step, available, _recomputed)

    def new_plan(
        self,
        size: InputSize,
        available: int,
        in_step: InStep,
        *,
        real: InputSize | None = None,
    ) -> tuple[Plan, Estimate] | None:
        """A plan, and the estimate it was made from; None if it is better to observe.

        `real` is the step's own size, where the plan is made for one that is hardly larger.
        """
        estimate = self.cost_model.estimate(size)
        if estimate is None:
            return None
        profile = estimate.profile.in_step(*in_step)
        plan = self.planner.plan(profile, available)
        calm = self.strictness == AS_PLANNED
        if estimate.at_most_as is not None:
            if calm and self._better_observed(size, plan, estimate.at_most_as):
                return None
            self.cost_model.planned_by_bound()
        # Beyond what was seen predictions are generous: what does not fit by them may fit, and
        # what is recomputed may not have to be. Where most blocks are kept to observe it, look.
        size = real or size
        if self.cost_model.beyond(size) and (self.cost_model.doubts_beyond or not plan.fits):
            return None
        cheap = self._samples and calm and self.cost_model.similar_for(size)
        if cheap and any(plan.recompute) and self.cost_model.far_beyond(size):
            return None
        strict = self._as_strict_as_must_be(plan, profile, available)
        return strict, replace(estimate, profile=profile)

    def _better_observed(self, size: InputSize, plan: Plan, bound_of: InputSize) -> bool:
        """Whether to observe a size rather than follow a plan that was made from a bound.

        Such a plan recomputes more than needed. Where it recomputes nothing, a few sizes are
        observed all the same: a larger size's costs tell nothing of this one under other budgets.
        """
        if any(plan.recompute):
            return self.cost_model.curious(size)
        return bound_of != size and self.cost_model.curious_at_ease(size)

    def predict(self, size: InputSize, in_step: InStep) -> Profile | None:
        """What a size costs in a step in which this happens; None where too little is known."""
        profile = self.cost_model.predict(size)
        return None if profile is None else profile.in_step(*in_step)

    def _as_strict_as_must_be(self, plan: Plan, profile: Profile, available: int) -> Plan:
        if self.strictness == AS_PLANNED:
            return plan
        strictest = RecomputeAll().plan(profile, available)
        if self.strictness == EVERYTHING:
            return strictest
        halfway = (strictest.peak_bytes + plan.peak_bytes) // 2
        return Optimal().plan(profile, min(available, halfway))

    def _unknown(self) -> Decision | None:
        """Observe; after a failure rather recompute whatever runs, and look at nothing."""
        if self.strictness != EVERYTHING:
            return None
        return Decision(CachedPlan(Plan((), 0, 0.0, False), {}), 0, range(0), False)

    def _watched(
        self, setting: Setting, cached: CachedPlan, size: InputSize, available: int
    ) -> range:
        """The runs at which memory is looked at: all in doubt, the last one now and then."""
        if self.cost_model.any_order:  # no timeline tells what is in use when a run comes
            return _NOWHERE
        if not cached.doubtful:
            self._unwatched += 1
            if self._unwatched < _PROBE_EVERY:
                return _NOWHERE
        runs = len(cached.plan.recompute)
        if cached.doubtful:
            near = cached.plan.kept and cached.plan.peak_bytes > _NEAR * available
            return range(runs) if near and cached.profile is not None else _NOWHERE
        if cached.profile is not None and cached.profile.size != size:
            return _NOWHERE  # another size's timeline tells nothing
        self._unwatched = 0
        tells = cached.plan.kept and cached.profile is not None and not setting.meter.private
        return range(runs - 1, runs) if tells else _NOWHERE

    def step_over(self, step: PlannedStep, real_rise: int | None, limit: int) -> None:
        """A planned step rose so far above its start; None if nobody could see.

        A doubt counts if something is at stake: a block recomputed, or memory near the limit.
        """
        cost_model = self.cost_model
        if not step.plan.recompute:  # it had to run without a prediction
            return
        cost_model.skips.note(step.skipped)
        if step.out_of_order:
            cost_model.orders_vary()
        if not step.corrected and not step.rehearsed:
            predicted_rise = step.predicted_peak - step.start.in_use
            above = real_rise is not None and real_rise > predicted_rise
            if above and cost_model.beyond(step.size):
                self._doubt_beyond(cost_model)
            # Another size's peak tells no more, nor does that of fewer runs or another handle's
            # step, nor the first of two backwards.
            tells = step.exact and step.ran_as_planned and not step.retained
            tells = above or (tells and not step.peaks_with_others)
            cost_model.peaked(step.size, predicted_rise, real_rise if tells else None)
        if not step.doubtful:
            cost_model.prediction_margin.note_difference(step.difference)
        if step.ran_out and not step.doubtful:  # and was rescued
            cost_model.prediction_margin.failed()
            self._observe_next()
        near = step.start.in_use + max(step.plan.peak_bytes, real_rise or 0) > _AT_STAKE * limit
        at_stake = near or any(step.plan.recompute)
        doubt = cost_model.prediction_margin.in_doubt and not step.doubtful and at_stake
        if step.surprised:  # not always the very next one: steps of two kinds may take turns
            self._observe_next(after=self._surprises % 2)
        elif doubt:
            self._observe_next()

    def later_backward_over(self, before: int, real: int, planned_with: int) -> None:
        """One more backward through a graph, which was to peak at `before`, peaked at `real`.

        `planned_with` is what the step's plan already had for it.
        """
        if real > before and self.cost_model.retained:
            self.cost_model.note_later(planned_with + real - before)

    def failed(self, step: Step) -> None:
        """A step has run out of memory: is what it was planned from still true?"""
        if not step.kept_anything:
            return
        if not isinstance(step, PlannedStep):
            self.look_at_all()
        elif step.doubtful and self._planned_from.beyond(step.size):
            self._doubt_beyond(self._planned_from)
        else:
            self._planned_from.failed(step.size)

    def _doubt_beyond(self, cost_model: CostModel) -> None:
        """A size beyond those seen took more than was predicted: observe the next such one."""
        cost_model.doubts_beyond = True
        self.cache.forget_doubtful()

    def _observe_next(self, *, after: int = 0) -> None:
        if self.cost_model.look_in is None and self._surprises < _MOST_SURPRISES:
            self._surprises += 1
            self.cost_model.look_in = after

    def look_at_all(self) -> None:
        """Memory ran out in a step that was observed in part: the next one is seen whole."""
        self._look_at_all = True

    def learn(self, observation: StepObservation, *, timed: bool = True) -> bool:
        """Take an observation in, with its times if these are known; whether that made what was
        known void."""
        cost_model = self.cost_model.of(born=observation.gradients_born)
        prediction_margin = cost_model.prediction_margin
        doubted = prediction_margin.in_doubt or cost_model.has_failed_at(observation.size)
        mark = cost_model.mark
        void = cost_model.learn(observation, doubted=doubted, timed=timed)
        if cost_model.mark is mark:  # as expected; but what was beyond it no longer is
            self.cache.forget_doubtful()
        if void:
            cost_model.prediction_margin = type(prediction_margin)()
            self._surprises = 0
        elif doubted:
            prediction_margin.reassured()
        return void

    def to_plain(self) -> list[dict[str, Any]]:
        """What is known, by regime; plain numbers and strings."""
        return self._cost_models.to_plain()

    def take_in(self, plain: list[Mapping[str, Any]], blocks: int) -> None:
        """Know again, of a model of so many blocks, what `to_plain` gave: all of it or nothing."""
        self._cost_models.take_in(plain, blocks)
        self.cache.clear()
        if self.regime is not None:
            self.enter(self.regime)

    def why_unknown(self) -> str | None:
        """Why what was taken in does not serve the present regime; None if it does."""
        return None if self.cost_model.version else self._cost_models.difference_from_others()


def _guarded_bytes(setting: Setting) -> int:
    """How far below what is available kept runs are guarded."""
    return int(_GUARDED * setting.budget_bytes) - setting.reserve.bytes


def _recomputed(profile: Profile, available_bytes: int) -> tuple[bool, ...]:
    return Optimal().plan(profile, available_bytes).recompute
