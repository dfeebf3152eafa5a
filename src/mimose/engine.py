"""The steps of one model: opened by its blocks, decided, carried out, learned from.

What happens is asked for by the seats: the model's own (`forward_begins`, `forward_returned`) and
those on its blocks (`recompute`, which opens a step with its first block). At the end of a step's
backward what it has taught is kept for the next.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mimose.allocator import AllocatorLease
from mimose.attach import Attachment, BlockSeat
from mimose.block_names import pattern_of
from mimose.blocks import Block
from mimose.budget import Budget, text_of
from mimose.bypass import Tripwire
from mimose.collectives import several
from mimose.collector import Ride
from mimose.correction import Watch
from mimose.decision import Decision
from mimose.errors import warn
from mimose.herald import Herald
from mimose.identity import difference, identity_of
from mimose.inputs import (
    MOST_PASSES,
    InputSize,
    SizeFunction,
    argument_names,
    input_size,
    measured_by,
)
from mimose.lessons import Lessons
from mimose.memory import Reading
from mimose.observations import StepObservation
from mimose.overlap import Overlap, predicts
from mimose.plan_cache import CachedPlan
from mimose.ranks import Agreement
from mimose.rebuilt import Rebuilt
from mimose.recording import Header
from mimose.regime import Regime
from mimose.report import Stats
from mimose.restart import Keepsake, Restart
from mimose.root import RootSeat
from mimose.scheduler import Scheduler
from mimose.setting import Setting, device_of
from mimose.stale import Stale
from mimose.steps import ObservedStep, PlannedStep, Step, WatchedStep
from mimose.trees import tensors_in

log = logging.getLogger("mimose")


class Engine:
    """What a handle does while the model trains. `Mimose` is its public face."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        budget: Budget,
        *,
        scheduler: Scheduler,
        collector: type[Ride],
        enforce: bool,
        allocator: str,
        measure: SizeFunction | None,
    ) -> None:
        self._budget = budget
        self._scheduler = scheduler
        self._collector = collector
        self._enforce = enforce
        self._allocator = AllocatorLease(allocator)
        self._measure = measure
        self._names = [block.name for block in blocks]
        self._stale = Stale()
        self._overlap = Overlap()
        self._stats = Stats()
        self._herald = Herald()
        self._step: Step | None = None
        self._last_step: Step | None = None
        self._decision: Decision | None = None
        """The last one."""
        self._lessons = Lessons()
        self._loaded: Mapping[str, Any] | None = None
        self._identity: dict[str, Any] = {}
        self._verdicts: list[dict[str, Any] | None] = []
        self._keepsake: Keepsake | None = None
        self._finalizers: list[weakref.finalize[..., nn.Module]] = []
        self._after_broken_step = False
        self._forward_failed = False
        self._announced_size: InputSize | None = None
        self._latest_size: InputSize | None = None
        self._in_use_before: int | None = None
        self._setting: Setting | None = None
        self._attachment: Attachment | None = None
        self._rebuilt: Rebuilt | None = None
        self._learns_anew = False
        self._agreement = Agreement([])
        self._several = False
        self._tripwire = Tripwire(model, [])
        self._root = RootSeat(model, self)
        self._argument_names = argument_names(model.forward)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None before the first training step has settled a relative one."""
        return self._setting.budget_bytes if self._setting else self._budget.total_bytes

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
        if self._herald.recorder is not None:
            self._read_observations()
            self._herald.recorder.close()

    # What the blocks and the root ask

    def recompute(self, seat: BlockSeat, args: Any, kwargs: Any) -> bool:
        """Whether the coming run of a block is recomputed; the first one opens the step."""
        step = self._step
        if step is None or step.over or (seat.index == step.first_block and step.abandoned):
            self._after_broken_step |= step is not None and step.broken
            step = self._open(args, kwargs)
            step.first_block = seat.index
        elif step.inside:
            step.goes_on()
        return step.recompute(seat, args, kwargs)

    def ran_out(self, seat: BlockSeat) -> None:
        """Memory ran out while a block was to be kept: it, and what comes, is recomputed."""
        self._stats.recoveries += 1
        self._herald.recomputed_instead(seat.name)
        if isinstance(self._step, PlannedStep):
            self._step.recompute_the_rest()
        elif isinstance(self._step, ObservedStep):
            self._step.ride.keep_no_more()
            self._step.ride.spoil()
            self._scheduler.look_at_all()

    def forward_begins(self, args: Any, kwargs: Any) -> None:
        """The root's forward is called in training."""
        self._forward_failed = False
        assert self._attachment is not None
        self._attachment.take_seats()
        if self._step is None or self._step.over or self._step.abandoned:
            self._look_for_rebuilt()
        self._attachment.caches.forward_begins(args, kwargs)
        if self._setting is None or self._attachment.takeover.due:
            self._take_over()
        if self._setting is None:
            self._settle()
        else:
            self._setting.look_for_replaced(self._root.module)
        size = self._size_of(args, kwargs, self._argument_names)
        step = self._step
        if step is not None and not step.over:
            if step.abandoned or step.blind:
                self._after_broken_step |= step.broken
                self._step = None
            else:
                self._another_pass(step, size)
        self._announced_size = self._latest_size = size
        self._in_use_before = None
        knowledge = self._scheduler.knowledge
        if self._setting is not None and not knowledge.reaches(knowledge.whole(size)):
            self._in_use_before = self._setting.meter.read().in_use  # it will be observed

    def _look_for_rebuilt(self) -> None:
        """Observe anew what blocks cost that are no longer what they were."""
        model = self._root.module
        names = [] if self._rebuilt is None else self._rebuilt.since_last(model)
        if names and self._setting is not None:
            self._setting.look_for_replaced(model, certain=True)
            self._read_observations()
            self._scheduler.forget()
            self._learns_anew = True
            self._herald.changed(f"other modules were put into {pattern_of(names)}")

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
        if done is None or self._setting is None or self._decision is None:
            return False
        cached = self._scheduler.plan_rest(self._setting, size, self._decision, done)
        if cached is not None:
            self._tell_if_too_little(self._setting, size, cached, step.start.in_use)
            step.plan_rest(size, cached)
            self._overlap.share_predictions(step)
        return cached is not None

    def _tell_if_too_little(
        self, setting: Setting, size: InputSize, cached: CachedPlan, in_use_bytes: int
    ) -> None:
        self._herald.tell_if_too_little(setting, size, cached.plan, in_use_bytes, cached.profile)

    def forward_returned(self, out: Any) -> None:
        """The root's forward is done."""
        if self._step is not None and self._setting is not None:
            self._step.model_returns(out)
            self._stale.outputs_are(tensors_in(out))
            self._look_for_holes()

    def _look_for_holes(self, *_: Any) -> None:
        """See, once a step and now and then, what its forward leaves lost between tensors."""
        step = self._step
        if not isinstance(step, PlannedStep) or self._setting is None or not step.forward_is_over:
            return
        if not step.looked_at:
            step.looked_at = True
            self._setting.forward_over(step.predicted_peak)

    def forward_failed(self) -> None:
        """An exception left the root's forward: no backward will come."""
        self._forward_failed = True
        if self._setting is not None and (self._last_step is None or self._last_step.over):
            self._setting.forgive_failures()  # before its first block: no plan could have helped
        self._step = None
        self._announced_size = None

    # A step's life

    def _open(self, args: Any, kwargs: Any) -> Step:
        if self._setting is None:
            self._settle()
        assert self._setting is not None
        self._tripwire.close()
        if self._herald.recorder is not None:
            self._herald.recorder.step_begins()
        self._read_observations()
        if self._stats.steps % 16 == 0:  # asking takes as long as a plan from the cache
            self._several = several()
        by_itself = self._announced_size is None  # the model's own forward was not called
        if by_itself:
            self._look_for_rebuilt()
        size = self._latest_size = self._announced_size or self._size_of(args, kwargs)
        self._announced_size = None
        self._stale.step_starts(self._setting.device)
        regime = self._setting.lookout.regime()
        if regime != self._scheduler.regime:
            self._enter(self._setting, regime)
        reading = self._setting.meter.read()
        self._setting.step_begins(reading)
        began = time.perf_counter()
        whole = self._scheduler.knowledge.whole(size)
        around = self._overlap.around(self._setting.device)
        planned = self._planned(self._setting, whole, reading, around)
        if planned is not None and by_itself:
            planned.when_forward_is_over(self._look_for_holes)
        step: Step = planned or self._observed(self._setting, size, whole, reading, around)
        planning_seconds = time.perf_counter() - began
        self._stats.step_opened(step, reading, planning_seconds)
        if self._herald.recorder is not None:
            self._herald.recorder.step_opens(reading.in_use, planning_seconds)
        self._overlap.opened(step, around)
        step.when_later = self._later_backward_over
        self._step = self._last_step = step
        return step

    def _settle(self) -> None:
        """Settle device and bytes; before the root runs, where FSDP2 gathers its parameters."""
        self._set_allocator_up(device_of(self._root.module))
        self._setting = Setting(self._root.module, self._budget, enforce=self._enforce)
        self._finalizers.append(weakref.finalize(self._root.module, self._setting.close))
        self._identity = identity_of(self._root.module, self._names, self._setting.device)
        if self._loaded is not None:
            self._take_in(self._loaded)
        if self._herald.recorder is not None:
            self._herald.recorder.begins(self._header(self._setting))

    def _set_allocator_up(self, device: torch.device) -> None:
        """When attaching, or at the first step if the model came to the device since."""
        if self._allocator.take(device):
            give_back = weakref.finalize(self._root.module, self._allocator.give_back)
            give_back.atexit = False
            self._finalizers.append(give_back)

    def _enter(self, setting: Setting, regime: Regime) -> None:
        first = self._scheduler.regime is None
        change = self._scheduler.enter(regime)
        if self._herald.recorder is not None:
            self._herald.recorder.enters(regime, self._scheduler.knowledge)
        if first:
            reason = self._scheduler.why_unknown()
            if reason is not None:
                warn(f"what was learned before does not hold here: {reason}. Observing anew")
            return
        setting.look_again()
        if self._keepsake is not None:
            self._keepsake.parameters.look_again()
        if change is not None:
            self._herald.changed(change)

    def _take_over(self) -> None:
        """From checkpointing that was on before, or that a trainer has switched on since."""
        assert self._attachment is not None
        takeover = self._attachment.takeover
        if takeover.refresh() or (takeover and self._setting is None):
            log.info("mimose decides now instead of %s", takeover)

    def _planned(
        self, setting: Setting, size: InputSize, reading: Reading, around: Sequence[Step]
    ) -> PlannedStep | None:
        """The step under the plan for this size, if enough is known of it."""
        last = self._last_step
        broken = last if last is not None and not last.over else None
        beside, stale = self._overlap.beside_bytes(around, reading.in_use), self._stale.expected()
        decision = self._scheduler.decide(setting, size, reading, stale, broken, beside)
        if around and decision is not None and not all(map(predicts, around)):
            decision = decision.keeping_nothing()  # what is around it is being looked at
        if self._several:
            decision = self._agreed(decision)
        if decision is None:
            return None
        self._decision, cached = decision, decision.cached
        bounded = bool(beside) or self._scheduler.knowledge.any_order
        if decision.new and len(size.passes) == 1 and not bounded:  # else more is only expected
            self._tell_if_too_little(setting, size, cached, reading.in_use)
        if isinstance(self._last_step, ObservedStep):
            self._stop_listening()
        setting.make_room(reading.in_use + cached.plan.peak_bytes, reading)
        start = setting.start_planned_step(reading)
        unused = self._scheduler.knowledge.unused
        over, guarded = self._planned_step_over, cached.guarded
        step = (size, cached.plan, cached.again, start, over, guarded, unused)
        if decision.watched and cached.profile is not None:
            profile, available = cached.profile, decision.available_bytes
            base, at = reading.in_use, decision.watched
            watch = Watch(setting.meter, base, profile, cached.plan, available, at)
            planned: PlannedStep = WatchedStep(*step, watch=watch)
        else:
            planned = PlannedStep(*step)
        knowledge = self._scheduler.knowledge
        planned.exact, planned.doubtful = cached.exact and not bounded, cached.doubtful
        if not (knowledge.any_order or (self._several and self._agreement.needed)):
            planned.follow_order(skips=bool(knowledge.skips))
        planned.later_bytes = knowledge.later_bytes if knowledge.retained else None
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
            sample = self._scheduler.sample(setting, whole, reading, self._stale.expected())
        setting.meter.reset_peak()
        ride = self._collector(
            setting.meter,
            setting.clock,
            setting.gradients,
            self._stale,
            self._in_use_before,
            sample,
        )
        ride.known_unused = self._scheduler.knowledge.unused
        if self._after_broken_step:  # the engine lets go of its memory in the middle of this one
            ride.spoil()
            self._after_broken_step = False
        return ObservedStep(size, whole, ride, self._observed_step_over)

    def _observed_step_over(self, step: ObservedStep) -> None:
        self._stats.observed_step_over(step)
        if self._setting is not None:
            unusable = step.ride.unusable_beyond(self._stats.peak_bytes)
            self._setting.reserve.learn_unusable(unusable)
            existed, cleared = step.ride.gradients_existed, step.ride.gradients_cleared
            self._setting.gradients.step_over(existed=existed, cleared=cleared)
        if self._herald.recorder is not None and self._setting is not None:
            reserve = self._setting.reserve.bytes
            self._herald.recorder.step_over(step.size, None, step.ride.peak, None, reserve)
        self._scheduler.knowledge.unused.update(step.ride.unused)
        self._scheduler.knowledge.retained.note(step.retained)
        if step.ride.born is not None:
            kind = self._scheduler.knowledge.of(born=step.ride.gradients_born)
            kind.note_born(*step.ride.born)
        if self._stats.steps > 1:
            self._lessons.add(step)
        else:  # it has no optimizer state, makes workspaces and tries blocks out
            self._note_kin(step, step.ride.observation(step.size, rough=True))

    def _planned_step_over(self, step: PlannedStep) -> None:
        assert self._setting is not None
        reading = self._setting.reading_after(step.predicted_peak)
        real = None if reading is None else step.real_peak(reading)
        self._stats.planned_step_over(step, reading, real)
        if self._herald.recorder is not None:
            reserve = self._setting.reserve.bytes
            held = None if reading is None else reading.peak_held
            self._herald.recorder.step_over(
                step.size, step.plan, real, held, reserve, bound=not step.exact
            )
        if reading is not None:
            self._setting.learn_reserve(reading, real or step.predicted_peak)
        self._setting.gradients.step_over()
        rise = None if real is None or not step.told_of_others else real - step.start.in_use
        expected = self._scheduler.knowledge.retained.note(step.retained)
        if expected and not step.after_broken:
            limit = self._setting.budget_bytes - self._setting.reserve.bytes
            self._scheduler.step_over(step, rise, limit)

    def _later_backward_over(self, step: Step) -> None:
        """One more backward through a step's graph is done: its peak is the step's, too."""
        if step is not self._last_step or self._setting is None or not self._setting.open:
            return
        reading = self._setting.meter.read()
        self._stats.note_peak(reading)
        if isinstance(step, ObservedStep):
            self._scheduler.later_backward_over(step.ride.peak, reading.peak, 0)
        elif isinstance(step, PlannedStep) and (real := step.real_peak(reading)) is not None:
            self._stats.later_backward_over(step, real)
            if step.later_bytes is not None:
                self._scheduler.later_backward_over(step.predicted_peak, real, step.later_bytes)

    def _read_observations(self) -> None:
        """Learn from observed steps at once; take their times in when the device can tell."""
        if not self._lessons:
            return
        for lesson in self._lessons.new():
            observation = lesson.observation()
            knowledge = self._scheduler.knowledge.of(born=lesson.step.ride.gradients_born)
            knowledge.note_order(lesson.step.size.layout, lesson.step.ride.pattern)
            if lesson.step.ride.given_up:
                knowledge.note_given_up(lesson.step.ride.given_up)
            if lesson.step.ride.unlike:
                knowledge.not_alike(lesson.step.size)
            self._note_kin(lesson.step, observation)
            if observation is not None:
                self._learn(observation, timed=lesson.step.ride.timed)
                lesson.knowledge, lesson.regime = knowledge, self._scheduler.regime
        for lesson in self._lessons.late():
            observation = lesson.observation()
            assert observation is not None
            assert lesson.knowledge is not None
            lesson.knowledge.take_times(observation)
            if self._herald.recorder is not None:
                self._herald.recorder.timed(observation, lesson.regime)

    def _note_kin(self, step: ObservedStep, observation: StepObservation | None) -> None:
        ride = step.ride
        if observation is not None and ride.straight and not (ride.kept or ride.fleeting):
            knowledge = self._scheduler.knowledge.of(born=observation.gradients_born)
            knowledge.note_kin(observation)

    def _learn(self, observation: StepObservation, *, timed: bool) -> None:
        was_ready = self._scheduler.knowledge.ready
        void = self._scheduler.learn(observation, timed=timed)
        if self._herald.recorder is not None:
            self._herald.recorder.learned(observation, anew=void or self._learns_anew)
        self._learns_anew = False
        if void:
            self._herald.changed(f"input {observation.size} takes more or less than it did")
        elif self._scheduler.knowledge.ready and not was_ready:
            assert self._setting is not None
            observed = self._stats.observed_steps
            self._herald.planning_begins(
                self._setting, len(self._names), observed, self._allocator.left_because
            )

    # What a recovery asks

    def restart(self) -> Restart:
        """The way back to this moment."""
        model = self._root.module
        if self._keepsake is None:
            device = next(model.parameters()).device
            self._keepsake = Keepsake(device, model)
            self._finalizers.append(weakref.finalize(model, self._keepsake.close))
        return Restart(self._keepsake)

    def be_as_strict_as(self, strictness: int) -> None:
        """From now on, plan so strictly."""
        self._scheduler.strictness = strictness

    def give_up_step(self) -> bool:
        """Forget the step that failed; whether it kept anything."""
        step, self._step, self._announced_size = self._last_step, None, None
        self._after_broken_step, self._forward_failed = True, False
        self._stats.recoveries += 1
        # One that is over is not the one that failed: that never got to its first block.
        planned = step if isinstance(step, PlannedStep) and not step.over else None
        if self._setting is not None:
            at = planned.predicted_peak if planned else self._setting.budget_bytes
            self._setting.failed(at)
        if step is None or step.over:
            return False
        if isinstance(step, ObservedStep):
            step.ride.spoil()
        self._scheduler.failed(step)
        return step.kept_anything

    def tell_of_failure(self, why: str, what_now: str) -> None:
        """Say that memory ran out, and what is done about it."""
        self._herald.ran_out(self._latest_size, why, what_now)

    def failed_in_forward(self) -> bool:
        """Whether the model's forward was still running when memory ran out."""
        return self._forward_failed

    def does_not_fit(self) -> str:
        """What cannot be helped, in words and numbers."""
        if self._setting is not None:
            self._setting.forgive_failures()
        size = self._latest_size or "of unknown size"
        budget = text_of(self.budget_bytes) if self.budget_bytes else str(self._budget)
        base = text_of(self._stats.last_base_bytes)
        return (
            f"Input {size} does not fit with every block recomputed: the budget is {budget}, of "
            f"which {base} were in use at the step's start. Raise memory_budget, shorten the "
            "batch, or split it"
        )

    # Small things

    def _header(self, setting: Setting) -> Header:
        return Header.of(
            setting.device,
            blocks=tuple(self._names),
            budget_bytes=setting.budget_bytes,
            planner=self._scheduler.planner,
            collector=self._collector.__name__.lower(),
            enforce=self._enforce,
            parameter_bytes=setting.parameter_bytes,
            gradient_bytes=setting.gradient_bytes,
        )

    def _take_in(self, state: Mapping[str, Any]) -> None:
        assert self._setting is not None
        self._loaded = None
        try:
            reason = difference(state, self._identity)
            if reason is None and "identity" in state:  # else nothing had been learned
                self._scheduler.take_in(state["chapters"], len(self._names))
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
        for seat, verdict in zip(self._attachment.seats, verdicts, strict=False):
            if verdict is not None and seat.trusted is None:
                seat.believe(verdict)

    def _block_verdicts(self) -> list[dict[str, Any] | None]:
        """What the first run of each block has shown, also once detached."""
        if self._attachment is None:
            return self._verdicts
        return [seat.verdict for seat in self._attachment.seats]

    def _size_of(self, args: Any, kwargs: Any, names: Sequence[str] = ()) -> InputSize:
        if self._measure is not None:
            return measured_by(self._measure, args, kwargs)
        return input_size(args, kwargs, names)

    def _stop_listening(self) -> None:
        assert self._attachment is not None
        for seat in self._attachment.seats:
            seat.listener = None
