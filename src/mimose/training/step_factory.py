"""Open a step: decide how it runs, and make the objects that carry the decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mimose.costs import InputSize
from mimose.memory import Reading
from mimose.planning import CachedPlan
from mimose.tensors import PreviousOutputs
from mimose.training.collector import Collector
from mimose.training.decision import Decision
from mimose.training.eviction import StepEvictor
from mimose.training.hooks import ModelHooks
from mimose.training.notifications import Notifications
from mimose.training.options import Options
from mimose.training.overlap import Overlap, predicts
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting
from mimose.training.shuttle import Shuttle
from mimose.training.step import Step, StepOwner
from mimose.training.transfers import transfers_for

_FEW_BYTES = 1 << 10
"""A loss that the loop still holds takes no more than this, a cache does."""


class Opening(NamedTuple):
    """What is known when the first block of a step is called."""

    size: InputSize
    """The size of its first pass."""
    whole: InputSize
    """The expected size of all its passes."""
    reading: Reading
    """Memory at this moment."""
    previous_bytes: int
    """Bytes of the last step's outputs that will be freed before the backward."""
    around: Sequence[Step]
    """Open steps of other handles that wait for their backward."""
    last: Step | None
    """The last step of this handle."""
    number: int
    """How many steps came before."""
    in_use_before: int | None
    """In use when the model was called; None if it was not read."""
    after_broken: bool
    """Whether an earlier step broke off, so that its memory may be freed in this one."""


class StepFactory:
    """Opens the steps of one handle."""

    def __init__(
        self,
        scheduler: Scheduler,
        options: Options,
        hooks: ModelHooks,
        overlap: Overlap,
        previous_outputs: PreviousOutputs,
        notifications: Notifications,
        owner: StepOwner,
    ) -> None:
        self._scheduler = scheduler
        self._options = options
        self._may_keep = options.collector.keeps and not options.observe_only
        """Whether any step that is observed may keep blocks."""
        self._hooks = hooks
        self._overlap = overlap
        self._previous_outputs = previous_outputs
        self._notifications = notifications
        self._owner = owner

    def open(self, setting: Setting, opening: Opening) -> Step:
        """The step that begins now."""
        # Taken first: a subscriber may detach mimose when it is told that the budget is too small.
        attachment = self._hooks.attachment
        assert attachment is not None
        must_agree = self._hooks.must_agree
        decision = self._decide(setting, opening, must_agree=must_agree)
        collector = evictor = None
        start, cost_model = opening.reading, self._scheduler.cost_model
        if decision.measured:
            collector = self._collector_for(setting, opening)
            setting.meter.reset_peak()
        if decision.evictable:
            evictor = StepEvictor(
                setting.meter,
                start.in_use,
                decision.available_bytes,
                cost_model.proportions(opening.whole),
                collector,
            )
        if collector is None:
            start = setting.history.start_planned_step(start, decision.cached.plan.peak_bytes)
        transfers = None
        if collector is not None or decision.cached.plan.transfers:
            transfers = transfers_for(
                decision,
                setting.host,
                collector,
                setting.available(start.in_use),
                len(attachment.interceptors),
            )
        step = Step(
            decision,
            start,
            expected=opening.whole,
            size=opening.size if collector is not None else opening.whole,
            owner=self._owner,
            cost_model=cost_model,
            collector=collector,
            evictor=evictor,
            transfers=transfers,
            tried=attachment.tried,
        )
        choices = decision.cached.choices
        if choices and not (cost_model.any_order or must_agree):
            step.calls.expect(choices, may_skip=cost_model.skips.is_set)
        step.after_broken = opening.after_broken
        if collector is not None and (opening.after_broken or self._frees_caches(opening)):
            collector.spoil()  # memory of an earlier step is freed in this one
        if collector is None and transfers is None and decision.new and step.trusted:
            self._time_forward(setting, step)
        return step

    def plan_rest(self, setting: Setting, step: Step, whole: InputSize) -> bool:
        """Plan the runs of a step that are still to come, now that its size is known to be `whole`.

        Returns whether there is such a plan.
        """
        done = None if step.surprises else step.choices_so_far
        if done is None:
            return False
        cached = self._scheduler.plan_rest(setting, whole, step.decision, done)
        if cached is None:
            return False
        if cached.trusted:
            self._tell_if_too_little(setting, whole, cached, step.start.in_use)
        step.plan_rest(whole, cached, may_skip=self._scheduler.cost_model.skips.is_set)
        self._overlap.share_predictions(step)
        return True

    def _decide(self, setting: Setting, opening: Opening, *, must_agree: bool) -> Decision:
        """How the step runs, among those of other handles and other ranks."""
        size, reading, around, last = opening.whole, opening.reading, opening.around, opening.last
        may_evict = self._can_measure_kept(must_agree=must_agree)
        beside = self._overlap.beside_bytes(around, reading.in_use) if around else 0
        decision = self._scheduler.decide(
            setting,
            size,
            reading,
            opening.previous_bytes,
            last if last is not None and not last.over else None,
            beside,
            may_evict=may_evict,
        )
        if around and not all(map(predicts, around)):
            decision = decision.keeping_nothing()  # a step around this one is being measured
        if decision.observed and (around or not may_evict):
            decision = decision.seen_by_all()
        if self._hooks.of_several_ranks:
            decision = self._agreed(decision)
        bounded = bool(beside) or self._scheduler.cost_model.any_order
        if bounded:
            decision = decision._replace(cached=replace(decision.cached, exact=False))
        # Elsewhere more is only expected.
        if decision.new and decision.trusted and not bounded and len(size.passes) == 1:
            self._tell_if_too_little(setting, size, decision.cached, reading.in_use)
        return decision.seen_by_all() if self._options.observe_only else decision

    def _can_measure_kept(self, *, must_agree: bool) -> bool:
        """Whether blocks may be kept in a step that is observed, unless there are steps around."""
        cost_model = self._scheduler.cost_model
        alone = not (must_agree or self._overlap.interrupts)
        usual = not (cost_model.any_order or cost_model.retained.is_set)
        return alone and usual and self._may_keep

    def _agreed(self, decision: Decision) -> Decision:
        """This rank's decision, or the one that all ranks make together if they must agree."""
        agreement = self._hooks.agreement
        if agreement.untried:  # the first step shows which blocks issue collectives
            return decision.seen_by_all()
        if not agreement.needed:
            return decision
        choices = agreement.agree(None if decision.observed else decision.cached.choices)
        return decision.seen_by_all() if choices is None else decision.with_choices(choices)

    def _tell_if_too_little(
        self, setting: Setting, size: InputSize, cached: CachedPlan, in_use_bytes: int
    ) -> None:
        self._notifications.tell_if_too_little(
            setting, size, cached.plan, in_use_bytes, cached.profile
        )

    def _collector_for(self, setting: Setting, opening: Opening) -> Collector:
        cost_model, more = self._scheduler.cost_model, dict[str, Any]()
        if issubclass(self._options.collector, Shuttle):
            more["interceptors"] = self._hooks.interceptors
        return self._options.collector(
            setting.meter,
            setting.clock,
            setting.gradients,
            self._previous_outputs,
            opening.in_use_before,
            frozenset(cost_model.unused),
            cost_model.latest_costs(opening.whole),
            **more,
        )

    def _frees_caches(self, opening: Opening) -> bool:
        """Whether the backward of this step frees key-value caches: only the first forward fills
        them, and its output holds them until the second step."""
        attachment = self._hooks.attachment
        if opening.number != 1 or attachment is None or not attachment.caches.in_use:
            return False
        return opening.previous_bytes > _FEW_BYTES

    def _time_forward(self, setting: Setting, step: Step) -> None:
        """Measure, once for each size, how long the blocks take while nothing is observed."""
        host, profile = setting.host, step.decision.cached.profile
        if profile is not None and host.wants_time_of(step.expected, profile):
            prediction = self._scheduler.cost_model.predict(step.expected)
            if prediction is not None:
                step.after_forward.append(
                    host.pace.timer_for(step.expected, prediction.profile).stop
                )
