"""Runs the steps of one model: opens, decides, carries out, and learns from each.

Interceptors call this: the model's own (`forward_begins`, `forward_returned`, `forward_failed`) and
those on its blocks (`direct`, which opens a step with its first block). Events are
passed to subscribers as values.
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

from mimose.costs import MOST_PASSES, InputSize, Regime
from mimose.errors import warn
from mimose.execution import output_tensors
from mimose.interception import KEEP, Block, Directive, describe_blocks, name_pattern
from mimose.memory import AllocatorLease, Reading
from mimose.tensors import PreviousOutputs, argument_names, custom_input_size, input_size
from mimose.training.events import Events, RunStart, StepStart
from mimose.training.hooks import ModelHooks
from mimose.training.learned_state import LearnedState
from mimose.training.learner import Learner
from mimose.training.notifications import Notifications
from mimose.training.options import Options
from mimose.training.overlap import Overlap
from mimose.training.rewind import Rewind, RewindStore
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting, device_of, first_device
from mimose.training.step import Step
from mimose.training.step_factory import Opening, StepFactory
from mimose.units import Budget, text_of

log = logging.getLogger("mimose")


@dataclass(slots=True)
class _Now:
    """The open step, and what is known of the next one."""

    step: Step | None = None
    first_block: int = -1
    """The block that opened it; each further pass begins with this block again."""
    last: Step | None = None
    """The step opened last, whether it has ended or not."""
    announced: InputSize | None = None
    """The size of the batch that the model was called with, until its first block runs."""
    latest_size: InputSize | None = None
    in_use_before: int | None = None
    """In use when the model was called; read only if the step may be observed."""
    after_broken: bool = False
    """Whether a step broke off, so that its memory may be freed in the next one."""
    forward_failed: bool = False
    forward_raised: bool = False
    """Whether the last forward raised an exception."""
    failure_reported: bool = False
    """Whether the user knows that the last step ran out of memory."""
    holes_seen: bool = False
    """Whether memory lost between tensors was measured after the step's forward."""

    def forget_step(self) -> None:
        self.step = self.announced = None


class Engine:
    """Receives the calls of a model and its blocks, and runs the steps of its training."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        budget: Budget,
        scheduler: Scheduler,
        options: Options | None = None,
    ) -> None:
        self.budget = budget
        self.scheduler = scheduler
        self.options = options or Options()
        self.block_names = [block.name for block in blocks]
        self.argument_names = argument_names(model.forward)
        self.events = Events()
        self.setting: Setting | None = None
        self._hooks = ModelHooks(model, self)
        self._state = LearnedState(scheduler, self.block_names)
        self._notifications = Notifications(self.events)
        self._previous_outputs = PreviousOutputs()
        self._overlap = Overlap()
        self._now = _Now()
        self._allocator = AllocatorLease(self.options.allocator)
        self._learner = Learner(
            scheduler, self.events, self._notifications, self._allocator, len(blocks)
        )
        self._factory = StepFactory(
            scheduler,
            self.options,
            self._hooks,
            self._overlap,
            self._previous_outputs,
            self._notifications,
            self,
        )
        self._rewind_store: RewindStore | None = None
        self._finalizers: list[weakref.finalize[..., nn.Module]] = []

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes. A relative budget is None until the first training step."""
        return self.setting.budget_bytes if self.setting else self.budget.total_bytes

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        budget = text_of(self.budget_bytes) if self.budget_bytes else str(self.budget)
        count = len(self.block_names)
        return f"<mimose on {count} block{'s' * (count != 1)}, {budget}, {state}>"

    @property
    def model(self) -> nn.Module:
        return self._hooks.model

    @property
    def attached(self) -> bool:
        return self._hooks.attachment is not None

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that are intercepted and still alive."""
        modules = (interceptor.module_if_alive for interceptor in self._hooks.interceptors)
        return [module for module in modules if module is not None]

    def attach(self, blocks: list[Block]) -> None:
        """Intercept the calls of the model and of these blocks."""
        self._hooks.attach(blocks)
        device = first_device(self.model)
        name = type(self.model).__name__
        self._notifications.attached(name, describe_blocks(blocks), self.budget, device)
        self._set_allocator_up(device)

    def detach(self) -> None:
        """Restore the model. What was learned remains readable."""
        if not self.attached:
            return
        self._state.detach(self._hooks.interceptors)
        self._hooks.detach()
        self._now.step = self._now.last = None
        self._overlap.leave()
        for finalizer in self._finalizers:  # both close, and the model no longer holds on to them
            finalizer()
        self._finalizers = []
        self.read_observations()
        self.events.run_ends()

    # What the blocks and the model ask

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        """The directive for the next call of a block. The first call opens the step."""
        now = self._now
        step = now.step
        if step is None or step.over or (block == now.first_block and step.abandoned):
            now.after_broken |= step is not None and step.broken
            step = self._open(args, kwargs)
            if step is None:
                return KEEP
            now.first_block = block
        elif step.nesting.inner:
            step.goes_on()
        return step.direct(block, args, kwargs)

    def ran_out(self, block: int) -> None:
        """A kept block ran out of memory: it and all later blocks are recomputed."""
        self.events.memory_ran_out()
        self._notifications.recomputed_instead(self.block_names[block])
        if self._now.step is not None:
            self._now.step.ran_out()

    def forward_begins(self, args: Any, kwargs: Any) -> None:
        """The model was called in training."""
        now, attachment = self._now, self._hooks.attachment
        now.forward_failed = False
        assert attachment is not None
        attachment.forward_begins()
        step = now.step
        if step is None or step.over or step.abandoned:
            self._look_for_rebuilt()
        if not self.attached:  # by a subscriber
            return
        attachment.caches.start_forward(args, kwargs)
        if self.setting is None or attachment.takeover.needs_refresh:
            self._take_over()
        if self.setting is None:
            self._settle()
        else:
            self.setting.look_for_replaced()
        if not self.attached:
            return
        size = self.size_of(args, kwargs, self.argument_names)
        if step is not None and not step.over:
            if step.abandoned or step.backward.blind:
                now.after_broken |= step.broken
                now.step = None
            else:
                self._another_pass(step, size)
        now.announced = now.latest_size = size
        now.in_use_before = None
        cost_model = self.scheduler.cost_model
        if self.setting is not None and cost_model.worth_observing(cost_model.expected_size(size)):
            now.in_use_before = self.setting.meter.read().in_use

    def _look_for_rebuilt(self) -> None:
        """Forget all costs if blocks were replaced."""
        names = self._hooks.rebuilt_blocks()
        if names and self.setting is not None:
            self.setting.look_for_replaced(certain=True)
            self._learner.begin_anew()
            self._notifications.changed(f"other modules were put into {name_pattern(names)}")

    def _another_pass(self, step: Step, size: InputSize) -> None:
        """Another forward begins before the backward: compare it with the expected one."""
        whole = step.expected.with_pass(step.backward.passes, size)
        larger = whole is None or not whole <= step.expected
        if step.backward.passes + 1 >= MOST_PASSES:  # what stands for many must be just as expected
            larger = whole != step.expected
        if self._hooks.must_agree:  # no rank may go on otherwise than the others
            larger = self._hooks.agreement.any(larger)
        elif step.has_plan and step.backward.passes + 1 < MOST_PASSES and whole is not None:
            assert self.setting is not None
            larger &= whole == step.expected or not self._factory.plan_rest(
                self.setting, step, whole
            )
        step.another_pass(size, larger=larger)

    def forward_returned(self, out: Any) -> None:
        """The model's forward has returned."""
        if self._now.step is not None and self.setting is not None:
            self._now.step.model_returns(out)
            self._previous_outputs.remember(output_tensors(out))
            self._look_for_holes()

    def _look_for_holes(self) -> None:
        """Measure the memory lost between tensors, after the forward of some steps."""
        step = self._now.step
        if step is None or step.collector is not None or self.setting is None:
            return
        if step.forward_is_over and not self._now.holes_seen:
            self._now.holes_seen = True
            self.setting.history.forward_over(step.predicted_peak)

    def forward_failed(self) -> None:
        """The model's forward raised an exception, so no backward follows."""
        last = self._now.last
        self._now.forward_failed = self._now.forward_raised = True
        if self.setting is not None and (last is None or last.over):
            # Before its first block: no plan could have helped.
            self.setting.history.forgive_failures()
        self._now.forget_step()

    # A step's life

    def _open(self, args: Any, kwargs: Any) -> Step | None:
        """Open a step; None if a subscriber has detached mimose in one of the events of this."""
        if self.setting is None:
            self._settle()
        assert self.setting is not None
        now, setting = self._now, self.setting
        self._hooks.step_opens()
        self.events.step_opens()
        self.read_observations()
        by_itself = now.announced is None  # the model's own forward was not called
        if by_itself:
            self._look_for_rebuilt()
        size = now.latest_size = now.announced or self.size_of(args, kwargs)
        now.announced, now.holes_seen = None, False
        previous_bytes = self._previous_outputs.start_forward(setting.device)
        regime = setting.lookout.regime()
        if regime != self.scheduler.regime:
            self._enter(regime)
        reading = setting.meter.read()
        self._report_lost_step(reading)
        if not self.attached:
            return None
        setting.history.step_begins(reading)
        setting.host.read_times()
        began = time.perf_counter()
        around = self._overlap.around(setting.device)
        opening = Opening(
            size,
            self.scheduler.cost_model.expected_size(size),
            reading,
            previous_bytes,
            around,
            now.last,
            self._learner.progress.steps,
            now.in_use_before,
            now.after_broken,
        )
        step = self._factory.open(setting, opening)
        if step.decision.new and not self.attached:  # a subscriber was told that it does not fit
            return None
        now.after_broken = False
        if by_itself:
            step.after_forward.append(self._look_for_holes)
        planning_seconds = time.perf_counter() - began
        self._learner.progress.step_starts(reading)
        self.events.step_starts(
            StepStart(
                size=step.size,
                reading=reading,
                planning_seconds=planning_seconds,
                reserve_bytes=setting.reserve.bytes,
                link=setting.host.known_link,
            )
        )
        if not self.attached:
            return None
        self._overlap.opened(step, around)
        now.step = now.last = step
        return step

    def _report_lost_step(self, reading: Reading) -> None:
        """Tell the user if the last step ran out of memory, and nobody has told them yet."""
        now, setting = self._now, self.setting
        reported, now.failure_reported = now.failure_reported, False
        raised, now.forward_raised = now.forward_raised, False
        if setting is None or now.last is None or now.last.over or reported:
            return
        if not (raised or now.last.broken):  # its output may just not have been used
            return
        if setting.history.has_failed_since(reading):
            self._notifications.lost(now.last.size)

    def _settle(self) -> None:
        """Determine device and budget, before the model runs and FSDP2 gathers its parameters."""
        model = self.model
        self._set_allocator_up(device_of(model))
        self.setting = setting = Setting(
            model,
            self.budget,
            enforce=self.options.enforce,
            host_bytes=self.options.host_bytes,
            choices=self.options.choices,
        )
        self._finalizers.append(weakref.finalize(model, setting.close))
        interceptors, speed = self._hooks.interceptors, setting.host.speed
        self._state.settle(model, setting.device, interceptors, speed)
        self.events.run_starts(
            RunStart(
                device=setting.device,
                blocks=tuple(self.block_names),
                budget_bytes=setting.budget_bytes,
                planner=self.scheduler.planner,
                collector=self.options.collector.name,
                enforce=self.options.enforce,
                parameter_bytes=setting.parameter_bytes,
                gradient_bytes=setting.gradient_bytes,
            )
        )

    def _set_allocator_up(self, device: torch.device) -> None:
        """Configure the allocator; at the first step again, if the model was moved since."""
        if self._allocator.take(device):
            give_back = weakref.finalize(self.model, self._allocator.give_back)
            give_back.atexit = False
            self._finalizers.append(give_back)

    def _enter(self, regime: Regime) -> None:
        assert self.setting is not None
        first = self.scheduler.regime is None
        change = self.scheduler.enter(regime)
        self.events.regime_entered(regime, self.scheduler.cost_model)
        if not self.attached:
            return
        if first:
            reason = self.scheduler.why_unknown()
            if reason is not None:
                warn(f"what was learned before does not hold here: {reason}. Observing anew")
            return
        self.setting.look_again()
        if self._rewind_store is not None:
            self._rewind_store.refresh()
        if change is not None:
            self._notifications.changed(change)

    def _take_over(self) -> None:
        """Switch off the model's own checkpointing if it is on, and log that."""
        assert self._hooks.attachment is not None
        takeover = self._hooks.attachment.takeover
        if takeover.refresh() or (takeover and self.setting is None):
            log.info("mimose decides now instead of %s", takeover)

    # What a step teaches

    def step_over(self, step: Step) -> None:
        """The backward of a step is over."""
        if self.setting is not None and self.setting.open:
            self._learner.step_over(step, self.setting)

    def later_backward_over(self, step: Step) -> None:
        """Another backward through the graph of a step is over."""
        if step is self._now.last and self.setting is not None and self.setting.open:
            self._learner.later_backward_over(step, self.setting)

    def read_observations(self) -> None:
        """Learn from observed steps: bytes at once, times when the device has reported them."""
        self._learner.read_observations(self.setting)

    # What is kept across runs

    def state(self) -> dict[str, Any]:
        """What was learned, in plain numbers and strings."""
        self.read_observations()
        return self._state.to_plain(self._hooks.interceptors)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`; a state of something else is refused with a warning."""
        self._state.load(state, self._hooks.interceptors)

    @property
    def has_unread_state(self) -> bool:
        """Whether loaded state waits for the first step."""
        return self._state.waits

    # What a retry asks

    def rewind_point(self) -> Rewind:
        """The present state, to which a retry can return."""
        model = self.model
        if self._rewind_store is None:
            device = next(model.parameters()).device
            self._rewind_store = RewindStore(device, model)
            self._finalizers.append(weakref.finalize(model, self._rewind_store.close))
        return Rewind(self._rewind_store, self._hooks.interceptors)

    def be_as_strict_as(self, strictness: int) -> None:
        """Set how strict the next plans are."""
        self.scheduler.strictness = strictness

    def give_up_step(self) -> bool:
        """Discard the failed step. Returns whether it kept anything."""
        now, step = self._now, self._now.last
        now.forget_step()
        now.after_broken, now.forward_failed = True, False
        # One that is over is not the one that failed: that never got to its first block.
        failed = step if step is not None and not step.over else None
        if self.setting is not None:
            planned = failed is not None and failed.has_plan
            at = failed.predicted_peak if planned and failed else self.setting.budget_bytes
            self.setting.history.failed(at)
        if failed is None:
            return False
        if failed.collector is not None:
            failed.collector.spoil()
        self.scheduler.failed(failed)
        return failed.kept_anything

    def report_failure(self, why: str, what_now: str, *, again: bool) -> None:
        """Report that memory ran out, and what happens next: `again` if the step is retried."""
        if again:
            self.events.memory_ran_out()
            self.events.step_retried()
        self._now.failure_reported = True
        self._notifications.ran_out(self._now.latest_size, why, what_now)

    def failed_in_forward(self) -> bool:
        """Whether the model's forward was still running when memory ran out."""
        return self._now.forward_failed

    def does_not_fit(self) -> str:
        """Why the batch fits no plan, with numbers."""
        if self.setting is not None:
            self.setting.history.forgive_failures()
        size, last = self._now.latest_size or "of unknown size", self._now.last
        budget = text_of(self.budget_bytes) if self.budget_bytes else str(self.budget)
        base = text_of(self._learner.progress.base_bytes)
        needed = ""
        if last is not None and last.has_plan and last.predicted_peak > (self.budget_bytes or 0):
            needed = f"it needs {text_of(last.predicted_peak)}, "
        return (
            f"Input {size} does not fit with every block recomputed: {needed}the budget is "
            f"{budget}, of which {base} were in use at the step's start. Raise memory_budget, "
            "shorten the batch, or split it"
        )

    def size_of(self, args: Any, kwargs: Any, names: Sequence[str] = ()) -> InputSize:
        """The size of a batch, by the user's own measure if there is one."""
        if self.options.input_size is not None:
            return custom_input_size(self.options.input_size, args, kwargs)
        # A single batch without tensors, after others, must not end the run.
        may_be_empty = self._now.latest_size is not None
        return input_size(args, kwargs, names, may_be_empty=may_be_empty)
