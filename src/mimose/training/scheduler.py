"""Decide how each step runs, from the batch's size and the memory in use.

The paper's scheduler with its plan cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimose.costs import InputSize, Option, Regime, Run, StepObservation
from mimose.estimation import CostModel, CostModels, Surprise
from mimose.memory import Reading
from mimose.planning import CachedPlan, PlanCache, Planner
from mimose.training.decision import (
    AS_PLANNED,
    EVERYTHING,
    EVERYTHING_RECOMPUTED,
    UNKNOWN,
    Decision,
    PlanKey,
)
from mimose.training.plan_maker import PlanMaker
from mimose.training.setting import Setting
from mimose.training.step import Step

_AT_STAKE = 0.7
"""Above this share of the limit, a deviating peak matters even if nothing is recomputed."""


class Scheduler:
    """Decides how each step runs."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.cache = PlanCache()
        self.cost_model = CostModel()
        """The costs learned in the present regime."""
        self.strictness = AS_PLANNED
        self._cost_models = CostModels()
        self._plans = PlanMaker(planner, self.cache)

    def enter(self, regime: Regime) -> str | None:
        """Enter the regime of the coming step. Returns what changed, if the regime is new."""
        self.cost_model, change = self._cost_models.enter(regime)
        return change

    def forget(self) -> None:
        """Discard everything that was learned."""
        self.cost_model = CostModel()
        self._cost_models = CostModels()
        self.cache.clear()

    @property
    def regime(self) -> Regime | None:
        """The present one; None before the first step."""
        return self._cost_models.present

    # Before a step

    def turn_to_coming_step(self, setting: Setting) -> tuple[bool, ...]:
        """Predict for the kind of the coming step: one that allocates gradients, or adds to them.

        Returns which gradients do not exist yet, by a sample.
        """
        missing = setting.gradients.missing()
        self.cost_model.allocates = setting.gradients.will_be_allocated(missing)
        return missing

    def decide(
        self,
        setting: Setting,
        size: InputSize,
        reading: Reading,
        previous_bytes: int = 0,
        broken: Step | None = None,
        beside_bytes: int = 0,
        *,
        may_evict: bool = False,
    ) -> Decision:
        """How a step of this size runs.

        `previous_bytes` of the previous step's outputs are alive now and gone in the backward.
        `broken` is the last step, if it never came to its end. Steps of other handles rise by
        `beside_bytes` while this one is open. Kept activations can be dropped if it `may_evict`.
        """
        if setting.history.has_failed_since(reading):
            self._note_failures(setting, reading, broken)
        missing = self.turn_to_coming_step(setting)
        cost_model = self.cost_model
        calm = self.strictness == AS_PLANNED
        if calm and cost_model.reliability.suspects(size):
            return self._unknown()
        key = self._key(
            setting, size, reading, missing, previous_bytes, beside_bytes, may_evict=may_evict
        )
        cached, new = self.cache.get(key.conditions, key.available_bytes), False
        if cached is None:
            cached, new = self._plans.new(setting, cost_model, key), True
            if cached is None:
                return self._unknown()
        decision = Decision(cached, key.available_bytes, key, new)
        return decision if cached.trusted else self._cautious(decision)

    def _cautious(self, decision: Decision) -> Decision:
        """The same decision, for a step whose prediction is not trusted: whether it is observed,
        whether it is measured, and whether what it keeps may be evicted."""
        cost_model, cached, key = self.cost_model, decision.cached, decision.key
        assert key is not None
        # A larger size's costs are not this one's, but what fits by them does fit.
        safe = not cached.exact and cached.plan.fits
        calm = self.strictness == AS_PLANNED
        observed = calm and cost_model.worth_observing(key.size)
        roomy = calm and cached.plan.keeps_all and not cached.evictable
        skips = key.may_evict and not cost_model.worth_measuring(key.size, roomy=roomy)
        measured = observed or not (safe or skips)
        decision = decision._replace(
            observed=observed,
            measured=measured,
            evictable=key.may_evict and (measured or not (safe or roomy)),
        )
        return _with_one_recomputed_of_each_kind(decision) if observed else decision

    def _key(
        self,
        setting: Setting,
        size: InputSize,
        reading: Reading,
        missing: tuple[bool, ...],
        previous_bytes: int,
        beside_bytes: int,
        *,
        may_evict: bool,
    ) -> PlanKey:
        # Previous outputs take from the forward: the most that they may be is taken, the least is
        # given back.
        least, most = setting.bracket(previous_bytes) if previous_bytes else (0, 0)
        cost_model = self.cost_model
        available = setting.available(reading.in_use) / (1 + cost_model.uncertainty(size))
        return PlanKey(
            setting.rounded(int(available) + previous_bytes) - most,
            size,
            missing,
            least + setting.gradients.bytes_cleared_late(missing),
            cost_model.retained.is_set,
            cost_model.skips.is_set,
            cost_model.later_backward_bytes,
            cost_model.version,
            self.strictness,
            setting.bracket(beside_bytes)[1] if beside_bytes else 0,
            may_evict,
            setting.host.version,
            self.planner.version,
        )

    def plan_rest(
        self, setting: Setting, size: InputSize, decision: Decision, done: tuple[Option, ...]
    ) -> CachedPlan | None:
        """A plan for the rest of a step whose first runs are `done`, once its next pass is known.

        None if what was decided for the size that was expected had better stay. Bytes of theirs
        that wait on the host count as if they were on the device: they come back before all of
        what is to come now is gone.
        """
        if decision.key is None or self.strictness != AS_PLANNED:
            return None
        key = decision.key._replace(size=size, done=tuple(map(_on_device, done)))
        cached = self.cache.get(key.conditions, key.available_bytes)
        if cached is not None:
            return cached
        return self._plans.rest(setting, self.cost_model, key, decision.cached.plan)

    def _unknown(self) -> Decision:
        """Recompute everything and measure it; after failures measure nothing."""
        return EVERYTHING_RECOMPUTED if self.strictness == EVERYTHING else UNKNOWN

    # After a step

    def step_over(self, step: Step, real_rise: int | None, limit: int) -> None:
        """A step has ended that rose `real_rise` bytes above its start; None if not measured.

        Its peak matters if a block was recomputed, or if memory came near `limit`.
        """
        cost_model = self.cost_model
        if not step.has_plan:  # it had to run without a prediction
            return
        if not step.observed:
            cost_model.note_planned(step.expected)
        cost_model.skips.note(step.calls.skipped)
        if step.calls.out_of_order:
            cost_model.assume_any_order()
        for surprise in step.surprises:
            if surprise not in (Surprise.RUNS_SKIPPED, Surprise.OTHER_ORDER):
                cost_model.surprised()
        if step.surprises or step.tried_blocks or not step.trusted or real_rise is None:
            return
        predicted_rise = step.predicted_peak - step.start.in_use
        # A peak below that of more runs, of another handle's step or of a second backward says
        # nothing; one above it does.
        tells = step.ran_as_planned and not step.backward.retained and not step.decision.bounded
        tells &= step.nesting.others_peak <= step.own_peak
        near = step.start.in_use + max(predicted_rise, real_rise) > _AT_STAKE * limit
        if tells or real_rise > predicted_rise:
            matters = near or not step.plan.keeps_all
            cost_model.peaked(step.expected, predicted_rise, real_rise, matters=matters)

    def later_backward_over(self, before: int, real: int, planned_with: int) -> None:
        """A later backward through a graph peaked at `real`, where `before` was expected.

        `planned_with` is what the step's plan already had for it.
        """
        if real > before and self.cost_model.retained.is_set:
            self.cost_model.note_later_backward(planned_with + real - before)

    def failed(self, step: Step) -> None:
        """A step has run out of memory: doubt the prediction that it was planned from."""
        if step.kept_anything:
            step.cost_model.reliability.failed(step.expected)

    def _note_failures(self, setting: Setting, reading: Reading, broken: Step | None) -> None:
        kept = broken is None or broken.kept_anything
        if setting.history.note_failures(reading, kept=kept) and broken is not None:
            self.failed(broken)

    def learn(self, observation: StepObservation) -> bool:
        """Learn from an observation. Returns whether it voided all older ones."""
        self.cache.drop_untrusted()
        return self.cost_model.learn(observation)

    # Files

    def to_plain(self) -> list[dict[str, Any]]:
        """The learned costs of all regimes, in plain numbers and strings."""
        return self._cost_models.to_plain()

    def take_in(self, plain: list[Mapping[str, Any]], blocks: int) -> None:
        """Load the result of `to_plain` for a model with this number of blocks.

        Nothing is loaded if it is invalid, and an error is raised.
        """
        self._cost_models.load_plain(plain, blocks)
        self.cache.clear()
        if self.regime is not None:
            self.enter(self.regime)

    def why_unknown(self) -> str | None:
        """Why loaded costs do not apply to the present regime; None if they do."""
        return None if self.cost_model.observed else self._cost_models.difference_from_others()


def _with_one_recomputed_of_each_kind(decision: Decision) -> Decision:
    """The same decision for an observed step, with one block of each kind recomputed.

    The forward peak of a block that saves nothing cannot be measured while it is kept, nor whether
    its input could move to the host. One block shows both for all of its kind. It is not the first
    one, since the caller of the model often holds its input.
    """
    profile, choices = decision.cached.profile, dict(decision.cached.choices)
    if profile is None:
        return decision
    kinds: dict[tuple[int, int], list[Run]] = {}
    for run, cost in zip(choices, profile.runs, strict=True):
        if not cost.fixed:
            kinds.setdefault((cost.saved, cost.recompute_peak), []).append(run)
    for runs in kinds.values():
        if all(choices[run] is Option.KEEP for run in runs):
            choices[runs[min(1, len(runs) - 1)]] = Option.RECOMPUTE
    return decision.with_choices(choices)


def _on_device(option: Option) -> Option:
    """The same option without moving bytes to the host."""
    if not option.moves:
        return option
    return Option.RECOMPUTE if option.recomputes else Option.KEEP
