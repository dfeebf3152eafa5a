"""The steps of one model: opened by its blocks, decided, carried out, learned from.

What happens is asked for by the interceptors: the model's own (`forward_begins`,
`forward_returned`) and those on its blocks (`recompute`, which opens a step with its first block).
At the end of a step's backward what it has taught is kept for the next.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mimose.costs import MOST_PASSES, InputSize, Regime, StepObservation
from mimose.errors import warn
from mimose.execution import output_tensors, several
from mimose.interception import (
    Attachment,
    Block,
    BlockInterceptor,
    RootInterceptor,
    Tripwire,
    described,
    pattern_of,
)
from mimose.memory import AllocatorLease, Reading
from mimose.planning import CachedPlan, Decision
from mimose.tensors import (
    PreviousOutputs,
    SizeFunction,
    argument_names,
    input_size,
    measured_by,
)
from mimose.training.collector import RecomputeCollector
from mimose.training.correction import Watch
from mimose.training.events import Events, LaterBackward, RunStart, StepRecord, StepStart
from mimose.training.identity import FORMAT, difference, identity_of
from mimose.training.notifications import Notifications
from mimose.training.overlap import Overlap, predicts
from mimose.training.pending_observations import PendingObservations
from mimose.training.ranks import Agreement
from mimose.training.rebuilt import Rebuilt
from mimose.training.rewind import Rewind, RewindStore
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting, device_of, first_device
from mimose.training.steps import ObservedStep, PlannedStep, Step, WatchedStep
from mimose.units import Budget, text_of

log = logging.getLogger("mimose")

_FEW_BYTES = 1 << 10
"""A loss that the loop still holds takes no more: not a cache."""


@dataclass(slots=True)
class Progress:
    """How far a run has come, as far as its steps depend on it."""

    steps: int = 0
    observed_steps: int = 0
    peak_bytes: int = 0
    """The highest memory in use so far."""
    base_bytes: int = 0
    """In use when the last step started."""

    def step_starts(self, reading: Reading) -> None:
        self.note_peak(reading.peak if self.steps else reading.in_use)
        self.steps += 1
        self.base_bytes = reading.in_use

    def note_peak(self, number_of_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, number_of_bytes)


class Engine:
    """What happens while a model trains: steps opened, decided, carried out, learned from."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        budget: Budget,
        *,
        scheduler: Scheduler,
        collector: type[RecomputeCollector],
        enforce: bool,
        allocator: str,
        measure: SizeFunction | None,
    ) -> None:
        self.budget = budget
        self.scheduler = scheduler
        self._collector = collector
        self._enforce = enforce
        self._allocator = AllocatorLease(allocator)
        self.measure = measure
        self.block_names = [block.name for block in blocks]
        self._previous_outputs = PreviousOutputs()
        self._overlap = Overlap()
        self.events = Events()
        self._progress = Progress()
        self._notifications = Notifications(self.events)
        self._step: Step | None = None
        self._last_step: Step | None = None
        self._decision: Decision | None = None
        """The last one."""
        self._pending = PendingObservations()
        self._loaded: Mapping[str, Any] | None = None
        self._identity: dict[str, Any] = {}
        self._verdicts: list[dict[str, Any] | None] = []
        self._rewind_store: RewindStore | None = None
        self._finalizers: list[weakref.finalize[..., nn.Module]] = []
        self._after_broken_step = False
        self._forward_failed = False
        self._announced_size: InputSize | None = None
        self._latest_size: InputSize | None = None
        self._in_use_before: int | None = None
        self.setting: Setting | None = None
        self._attachment: Attachment | None = None
        self._rebuilt: Rebuilt | None = None
        self._learns_anew = False
        self._agreement = Agreement([])
        self._several = False
        self._tripwire = Tripwire(model, [])
        self._root = RootInterceptor(model, self)
        self.argument_names = argument_names(model.forward)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None before the first training step has settled a relative one."""
        return self.setting.budget_bytes if self.setting else self.budget.total_bytes

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        budget = text_of(self.budget_bytes) if self.budget_bytes else str(self.budget)
        return f"<mimose on {len(self.block_names)} blocks, {budget}, {state}>"

    @property
    def model(self) -> nn.Module:
        return self._root.module

    @property
    def attached(self) -> bool:
        return self._attachment is not None

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that are intercepted and still alive."""
        interceptors = [] if self._attachment is None else self._attachment.interceptors
        return [
            module
            for interceptor in interceptors
            if (module := interceptor.module_if_alive) is not None
        ]

    def attach(self, blocks: list[Block]) -> None:
        """Intercept the calls of the model and of these blocks."""
        model, device = self.model, first_device(self.model)
        self._attachment = Attachment(model, blocks, self)
        self._agreement = Agreement(self._attachment.interceptors)
        self._rebuilt = Rebuilt(self._attachment.interceptors)
        self._tripwire = Tripwire(model, blocks)
        self._root.take()
        self._notifications.attached(type(model).__name__, described(blocks), self.budget, device)
        self._set_allocator_up(device)

    def detach(self) -> None:
        """Leave the model as it was before. What was learned stays readable."""
        if self._attachment is None:
            return
        self._verdicts = self._block_verdicts()
        self._attachment.detach()
        self._attachment = self._rebuilt = None
        self._agreement = Agreement([])
        self._tripwire.close()
        self._root.leave()
        self._step = self._last_step = None
        self._overlap.leave()
        for finalizer in self._finalizers:  # both close, and the model no longer holds on to them
            finalizer()
        self._finalizers = []
        self.read_observations()
        self.events.run_ends()

    # What the blocks and the root ask

    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        """Whether the coming run of a block is recomputed; the first one opens the step."""
        step = self._step
        if step is None or step.over or (interceptor.index == step.first_block and step.abandoned):
            self._after_broken_step |= step is not None and step.broken
            step = self._open(args, kwargs)
            step.first_block = interceptor.index
        elif step.inside:
            step.goes_on()
        return step.recompute(interceptor, args, kwargs)

    def ran_out(self, interceptor: BlockInterceptor) -> None:
        """Memory ran out while a block was to be kept: it, and what comes, is recomputed."""
        self.events.memory_ran_out()
        self._notifications.recomputed_instead(interceptor.name)
        if isinstance(self._step, PlannedStep):
            self._step.recompute_the_rest()
        elif isinstance(self._step, ObservedStep):
            self._step.collector.keep_no_more()
            self._step.collector.spoil()
            self.scheduler.look_at_all()

    def forward_begins(self, args: Any, kwargs: Any) -> None:
        """The root's forward is called in training."""
        self._forward_failed = False
        assert self._attachment is not None
        self._attachment.intercept_again()
        if self._step is None or self._step.over or self._step.abandoned:
            self._look_for_rebuilt()
        self._attachment.caches.forward_begins(args, kwargs)
        if self.setting is None or self._attachment.takeover.due:
            self._take_over()
        if self.setting is None:
            self._settle()
        else:
            self.setting.look_for_replaced(self._root.module)
        size = self.size_of(args, kwargs, self.argument_names)
        step = self._step
        if step is not None and not step.over:
            if step.abandoned or step.blind:
                self._after_broken_step |= step.broken
                self._step = None
            else:
                self._another_pass(step, size)
        self._announced_size = self._latest_size = size
        self._in_use_before = None
        cost_model = self.scheduler.cost_model
        if self.setting is not None and not cost_model.reaches(cost_model.whole(size)):
            self._in_use_before = self.setting.meter.read().in_use  # it will be observed

    def _look_for_rebuilt(self) -> None:
        """Observe anew what blocks cost that are no longer what they were."""
        model = self._root.module
        names = [] if self._rebuilt is None else self._rebuilt.since_last(model)
        if names and self.setting is not None:
            self.setting.look_for_replaced(model, certain=True)
            self.read_observations()
            self.scheduler.forget()
            self._learns_anew = True
            self._notifications.changed(f"other modules were put into {pattern_of(names)}")

    def _another_pass(self, step: Step, size: InputSize) -> None:
        """One more forward begins before the backward: is it what was expected?"""
        whole = step.expected.with_pass(step.passes, size)
        larger = whole is None or not whole <= step.expected
        if step.passes + 1 >= MOST_PASSES:  # what stands for many must be just as expected
            larger = whole != step.expected
        if self._agreement.needed:  # no rank may go on otherwise than the others
            larger = self._agreement.any(larger)
        elif isinstance(step, PlannedStep) and step.passes + 1 < MOST_PASSES and whole is not None:
            larger &= whole == step.size or not self._plan_rest(step, whole)
        step.another_pass(size, larger=larger)

    def _plan_rest(self, step: PlannedStep, size: InputSize) -> bool:
        """Plan what is still to come of a step that turns out to be of this size; whether it can be
        done."""
        done = None if step.corrected else step.choices_so_far
        if done is None or self.setting is None or self._decision is None:
            return False
        cached = self.scheduler.plan_rest(self.setting, size, self._decision, done)
        if cached is not None:
            self._tell_if_too_little(self.setting, size, cached, step.start.in_use)
            step.plan_rest(size, cached)
            self._overlap.share_predictions(step)
        return cached is not None

    def _tell_if_too_little(
        self, setting: Setting, size: InputSize, cached: CachedPlan, in_use_bytes: int
    ) -> None:
        self._notifications.tell_if_too_little(
            setting, size, cached.plan, in_use_bytes, cached.profile
        )

    def forward_returned(self, out: Any) -> None:
        """The root's forward is done."""
        if self._step is not None and self.setting is not None:
            self._step.model_returns(out)
            self._previous_outputs.outputs_are(output_tensors(out))
            self._look_for_holes()

    def _look_for_holes(self, *_: Any) -> None:
        """See, once a step and now and then, what its forward leaves lost between tensors."""
        step = self._step
        if not isinstance(step, PlannedStep) or self.setting is None or not step.forward_is_over:
            return
        if not step.looked_at:
            step.looked_at = True
            self.setting.forward_over(step.predicted_peak)

    def forward_failed(self) -> None:
        """An exception left the root's forward: no backward will come."""
        self._forward_failed = True
        if self.setting is not None and (self._last_step is None or self._last_step.over):
            self.setting.forgive_failures()  # before its first block: no plan could have helped
        self._step = None
        self._announced_size = None

    # A step's life

    def _open(self, args: Any, kwargs: Any) -> Step:
        if self.setting is None:
            self._settle()
        assert self.setting is not None
        self._tripwire.close()
        self.events.step_opens()
        self.read_observations()
        if self._progress.steps % 16 == 0:  # asking takes as long as a plan from the cache
            self._several = several()
        by_itself = self._announced_size is None  # the model's own forward was not called
        if by_itself:
            self._look_for_rebuilt()
        size = self._latest_size = self._announced_size or self.size_of(args, kwargs)
        self._announced_size = None
        self._previous_outputs.step_starts(self.setting.device)
        regime = self.setting.lookout.regime()
        if regime != self.scheduler.regime:
            self._enter(self.setting, regime)
        reading = self.setting.meter.read()
        self.setting.step_begins(reading)
        began = time.perf_counter()
        whole = self.scheduler.cost_model.whole(size)
        around = self._overlap.around(self.setting.device)
        planned = self._planned(self.setting, whole, reading, around)
        if planned is not None and by_itself:
            planned.when_forward_is_over(self._look_for_holes)
        step: Step = planned or self._observed(self.setting, size, whole, reading, around)
        planning_seconds = time.perf_counter() - began
        self._progress.step_starts(reading)
        self.events.step_starts(
            StepStart(size=step.size, reading=reading, planning_seconds=planning_seconds)
        )
        self._overlap.opened(step, around)
        step.when_later = self._later_backward_over
        self._step = self._last_step = step
        return step

    def _settle(self) -> None:
        """Settle device and bytes; before the root runs, where FSDP2 gathers its parameters."""
        self._set_allocator_up(device_of(self._root.module))
        self.setting = Setting(self._root.module, self.budget, enforce=self._enforce)
        self._finalizers.append(weakref.finalize(self._root.module, self.setting.close))
        self._identity = identity_of(self._root.module, self.block_names, self.setting.device)
        if self._loaded is not None:
            self._take_in(self._loaded)
        self.events.run_starts(self._run_start(self.setting))

    def _set_allocator_up(self, device: torch.device) -> None:
        """When attaching, or at the first step if the model came to the device since."""
        if self._allocator.take(device):
            give_back = weakref.finalize(self._root.module, self._allocator.give_back)
            give_back.atexit = False
            self._finalizers.append(give_back)

    def _enter(self, setting: Setting, regime: Regime) -> None:
        first = self.scheduler.regime is None
        change = self.scheduler.enter(regime)
        self.events.regime_entered(regime, self.scheduler.cost_model)
        if first:
            reason = self.scheduler.why_unknown()
            if reason is not None:
                warn(f"what was learned before does not hold here: {reason}. Observing anew")
            return
        setting.look_again()
        if self._rewind_store is not None:
            self._rewind_store.parameters.look_again()
        if change is not None:
            self._notifications.changed(change)

    def _take_over(self) -> None:
        """From checkpointing that was on before, or that a trainer has switched on since."""
        assert self._attachment is not None
        takeover = self._attachment.takeover
        if takeover.refresh() or (takeover and self.setting is None):
            log.info("mimose decides now instead of %s", takeover)

    def _planned(
        self, setting: Setting, size: InputSize, reading: Reading, around: Sequence[Step]
    ) -> PlannedStep | None:
        """The step under the plan for this size, if enough is known of it."""
        last = self._last_step
        broken = last if last is not None and not last.over else None
        beside = self._overlap.beside_bytes(around, reading.in_use)
        stale = self._previous_outputs.expected()
        decision = self.scheduler.decide(setting, size, reading, stale, broken, beside)
        if around and decision is not None and not all(map(predicts, around)):
            decision = decision.keeping_nothing()  # what is around it is being looked at
        if self._several:
            decision = self._agreed(decision)
        if decision is None:
            return None
        self._decision, cached = decision, decision.cached
        bounded = bool(beside) or self.scheduler.cost_model.any_order
        if decision.new and len(size.passes) == 1 and not bounded:  # else more is only expected
            self._tell_if_too_little(setting, size, cached, reading.in_use)
        if isinstance(self._last_step, ObservedStep):
            self._stop_listening()
        setting.make_room(reading.in_use + cached.plan.peak_bytes, reading)
        start = setting.start_planned_step(reading)
        unused = self.scheduler.cost_model.unused
        over, guarded = self._planned_step_over, cached.guarded
        step = (size, cached.plan, cached.again, start, over, guarded, unused)
        if decision.watched and cached.profile is not None:
            profile, available = cached.profile, decision.available_bytes
            base, at = reading.in_use, decision.watched
            watch = Watch(setting.meter, base, profile, cached.plan, available, at)
            planned: PlannedStep = WatchedStep(*step, watch=watch)
        else:
            planned = PlannedStep(*step)
        cost_model = self.scheduler.cost_model
        planned.exact, planned.doubtful = cached.exact and not bounded, cached.doubtful
        if not (cost_model.any_order or (self._several and self._agreement.needed)):
            planned.follow_order(skips=bool(cost_model.skips))
        planned.later_bytes = cost_model.later_bytes if cost_model.retained else None
        planned.after_broken, self._after_broken_step = self._after_broken_step, False
        return planned

    def _agreed(self, decision: Decision | None) -> Decision | None:
        """What this rank has decided, or what ranks decide together where they must."""
        if self._agreement.untried:  # the first step tells which blocks speak to other ranks
            return None
        if not self._agreement.needed:
            return decision
        again = self._agreement.agree(None if decision is None else decision.cached.again)
        return None if decision is None or again is None else decision.with_choices(again)

    def _observed(
        self,
        setting: Setting,
        size: InputSize,
        whole: InputSize,
        reading: Reading,
        around: Sequence[Step],
    ) -> ObservedStep:
        sample = None
        alone = not (self._agreement.needed or around or self._overlap.interrupts)
        if self._collector.samples and alone:
            sample = self.scheduler.sample(
                setting, whole, reading, self._previous_outputs.expected()
            )
        setting.meter.reset_peak()
        collector = self._collector(
            setting.meter,
            setting.clock,
            setting.gradients,
            self._previous_outputs,
            self._in_use_before,
            sample,
        )
        collector.known_unused = self.scheduler.cost_model.unused
        if self._after_broken_step or self._caches_die:  # something of the last dies in this one
            collector.spoil()
            self._after_broken_step = False
        return ObservedStep(size, whole, collector, self._observed_step_over)

    @property
    def _caches_die(self) -> bool:
        """Whether this is the second step, and the caches that only the first forward fills live
        on in its output: they are gone in this step's backward."""
        if self._progress.steps != 1 or self._attachment is None:
            return False
        return self._attachment.caches.in_use and self._previous_outputs.expected() > _FEW_BYTES

    def _observed_step_over(self, step: ObservedStep) -> None:
        self._progress.observed_steps += 1
        self._progress.note_peak(step.collector.peak)
        if self.setting is not None:
            unusable = step.collector.unusable_beyond(self._progress.peak_bytes)
            self.setting.reserve.learn_unusable(unusable)
            existed, cleared = step.collector.gradients_existed, step.collector.gradients_cleared
            self.setting.gradients.step_over(existed=existed, cleared=cleared)
            self.events.step_over(_record_of_observed(step, self.setting.reserve.bytes))
        self.scheduler.cost_model.unused.update(step.collector.unused)
        self.scheduler.cost_model.retained.note(step.retained)
        if step.collector.born is not None:
            kind = self.scheduler.cost_model.of(born=step.collector.gradients_born)
            kind.note_born(*step.collector.born)
        if self._progress.steps > 1:
            self._pending.add(step)
        else:  # it has no optimizer state, makes workspaces and tries blocks out
            self._note_similar(step, step.collector.observation(step.size, rough=True))

    def _planned_step_over(self, step: PlannedStep) -> None:
        assert self.setting is not None
        reading = self.setting.reading_after(step.predicted_peak)
        real = None if reading is None else step.real_peak(reading)
        self.events.step_over(_record_of_planned(step, real, reading, self.setting.reserve.bytes))
        if reading is not None:
            self._progress.note_peak(reading.peak)
            self.setting.learn_reserve(reading, real or step.predicted_peak)
        self.setting.gradients.step_over()
        rise = None if real is None or not step.told_of_others else real - step.start.in_use
        expected = self.scheduler.cost_model.retained.note(step.retained)
        if expected and not step.after_broken:
            limit = self.setting.budget_bytes - self.setting.reserve.bytes
            self.scheduler.step_over(step, rise, limit)

    def _later_backward_over(self, step: Step) -> None:
        """One more backward through a step's graph is done: its peak is the step's, too."""
        if step is not self._last_step or self.setting is None or not self.setting.open:
            return
        reading = self.setting.meter.read()
        self._progress.note_peak(reading.peak)
        real = step.real_peak(reading) if isinstance(step, PlannedStep) else None
        self.events.later_backward_over(
            LaterBackward(
                reading=reading,
                predicted_peak_bytes=step.predicted_peak if isinstance(step, PlannedStep) else None,
                real_peak_bytes=real,
                comparable=isinstance(step, PlannedStep) and step.comparable,
            )
        )
        if isinstance(step, ObservedStep):
            self.scheduler.later_backward_over(step.collector.peak, reading.peak, 0)
        elif isinstance(step, PlannedStep) and real is not None and step.later_bytes is not None:
            self.scheduler.later_backward_over(step.predicted_peak, real, step.later_bytes)

    def read_observations(self) -> None:
        """Learn from observed steps at once; take their times in when the device can tell."""
        if not self._pending:
            return
        for pending in self._pending.new():
            observation = pending.observation()
            cost_model = self.scheduler.cost_model.of(born=pending.step.collector.gradients_born)
            cost_model.note_order(pending.step.size.layout, pending.step.collector.pattern)
            if pending.step.collector.given_up:
                cost_model.note_given_up(pending.step.collector.given_up)
            if pending.step.collector.unlike:
                cost_model.not_alike(pending.step.size)
            self._note_similar(pending.step, observation)
            if observation is not None:
                self._learn(observation, timed=pending.step.collector.timed)
                pending.cost_model, pending.regime = cost_model, self.scheduler.regime
        for pending in self._pending.late():
            observation = pending.observation()
            assert observation is not None
            assert pending.cost_model is not None
            pending.cost_model.take_times(observation)
            self.events.timed(observation, pending.regime)

    def _note_similar(self, step: ObservedStep, observation: StepObservation | None) -> None:
        collector = step.collector
        if (
            observation is not None
            and collector.straight
            and not (collector.kept or collector.fleeting)
        ):
            cost_model = self.scheduler.cost_model.of(born=observation.gradients_born)
            cost_model.note_similar(observation)

    def _learn(self, observation: StepObservation, *, timed: bool) -> None:
        was_ready = self.scheduler.cost_model.ready
        void = self.scheduler.learn(observation, timed=timed)
        self.events.learned(observation, anew=void or self._learns_anew)
        self._learns_anew = False
        if void:
            self._notifications.changed(f"input {observation.size} takes more or less than it did")
        elif self.scheduler.cost_model.ready and not was_ready:
            assert self.setting is not None
            observed = self._progress.observed_steps
            self._notifications.planning_begins(
                self.setting, len(self.block_names), observed, self._allocator.left_because
            )

    def state(self) -> dict[str, Any]:
        """What was learned, in plain numbers and strings."""
        self.read_observations()
        if self.setting is None:
            return dict(self._loaded) if self._loaded is not None else {"format": FORMAT}
        return {
            "format": FORMAT,
            "identity": self._identity,
            "chapters": self.scheduler.to_plain(),
            "blocks": self._block_verdicts(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Know what `state` gave; refused with a warning if it is of something else."""
        if self.setting is not None:
            self._take_in(state)
        elif (reason := difference(state, {})) is None:
            self._loaded = state
        else:  # whatever model it is for
            self._observe_anew(reason)

    @property
    def has_unread_state(self) -> bool:
        """Whether loaded state waits for the first step."""
        return self.setting is None and self._loaded is not None

    # What a recovery asks

    def rewind_point(self) -> Rewind:
        """The way back to this moment."""
        model = self._root.module
        if self._rewind_store is None:
            device = next(model.parameters()).device
            self._rewind_store = RewindStore(device, model)
            self._finalizers.append(weakref.finalize(model, self._rewind_store.close))
        return Rewind(self._rewind_store)

    def be_as_strict_as(self, strictness: int) -> None:
        """From now on, plan so strictly."""
        self.scheduler.strictness = strictness

    def give_up_step(self) -> bool:
        """Forget the step that failed; whether it kept anything."""
        step, self._step, self._announced_size = self._last_step, None, None
        self._after_broken_step, self._forward_failed = True, False
        self.events.memory_ran_out()
        # One that is over is not the one that failed: that never got to its first block.
        planned = step if isinstance(step, PlannedStep) and not step.over else None
        if self.setting is not None:
            at = planned.predicted_peak if planned else self.setting.budget_bytes
            self.setting.failed(at)
        if step is None or step.over:
            return False
        if isinstance(step, ObservedStep):
            step.collector.spoil()
        self.scheduler.failed(step)
        return step.kept_anything

    def tell_of_failure(self, why: str, what_now: str) -> None:
        """Say that memory ran out, and what is done about it."""
        self._notifications.ran_out(self._latest_size, why, what_now)

    def failed_in_forward(self) -> bool:
        """Whether the model's forward was still running when memory ran out."""
        return self._forward_failed

    def does_not_fit(self) -> str:
        """What cannot be helped, in words and numbers."""
        if self.setting is not None:
            self.setting.forgive_failures()
        size = self._latest_size or "of unknown size"
        budget = text_of(self.budget_bytes) if self.budget_bytes else str(self.budget)
        base = text_of(self._progress.base_bytes)
        return (
            f"Input {size} does not fit with every block recomputed: the budget is {budget}, of "
            f"which {base} were in use at the step's start. Raise memory_budget, shorten the "
            "batch, or split it"
        )

    # Small things

    def _run_start(self, setting: Setting) -> RunStart:
        return RunStart(
            device=setting.device,
            blocks=tuple(self.block_names),
            budget_bytes=setting.budget_bytes,
            planner=self.scheduler.planner,
            collector=self._collector.name,
            enforce=self._enforce,
            parameter_bytes=setting.parameter_bytes,
            gradient_bytes=setting.gradient_bytes,
        )

    def _take_in(self, state: Mapping[str, Any]) -> None:
        assert self.setting is not None
        self._loaded = None
        try:
            reason = difference(state, self._identity)
            if reason is None and "identity" in state:  # else nothing had been learned
                self.scheduler.take_in(state["chapters"], len(self.block_names))
                self._believe(state.get("blocks", []))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            reason = f"it is damaged ({error!r})"
        if reason is not None:
            self._observe_anew(reason)

    def _observe_anew(self, reason: str) -> None:
        warn(f"what was learned before is of no use: {reason}. Observing anew")

    def _believe(self, verdicts: Sequence[Mapping[str, Any] | None]) -> None:
        """Blocks need not be tried again; on several ranks they do, to see who speaks to whom."""
        if self._attachment is None or several():
            return
        for interceptor, verdict in zip(self._attachment.interceptors, verdicts, strict=False):
            if verdict is not None and interceptor.trusted is None:
                interceptor.believe(verdict)

    def _block_verdicts(self) -> list[dict[str, Any] | None]:
        """What the first run of each block has shown, also once detached."""
        if self._attachment is None:
            return self._verdicts
        return [interceptor.verdict for interceptor in self._attachment.interceptors]

    def size_of(self, args: Any, kwargs: Any, names: Sequence[str] = ()) -> InputSize:
        """The size of a batch, by the user's own measure if there is one."""
        if self.measure is not None:
            return measured_by(self.measure, args, kwargs)
        return input_size(args, kwargs, names)

    def _stop_listening(self) -> None:
        assert self._attachment is not None
        for interceptor in self._attachment.interceptors:
            interceptor.listener = None


def _record_of_observed(step: ObservedStep, reserve_bytes: int) -> StepRecord:
    return StepRecord(
        size=step.size,
        plan=None,
        predicted_peak_bytes=None,
        real_peak_bytes=step.collector.peak,
        peak_bytes=step.collector.peak,
        peak_held_bytes=step.collector.peak_held,
        reserve_bytes=reserve_bytes,
    )


def _record_of_planned(
    step: PlannedStep, real_peak: int | None, end: Reading | None, reserve_bytes: int
) -> StepRecord:
    return StepRecord(
        size=step.size,
        plan=step.plan,
        predicted_peak_bytes=step.predicted_peak,
        is_bound=not step.exact,
        real_peak_bytes=real_peak,
        peak_bytes=None if end is None else end.peak,
        peak_held_bytes=None if end is None else end.peak_held,
        reserve_bytes=reserve_bytes,
        comparable=step.comparable,
        corrected=bool(step.corrected),
    )
