"""Learns from finished steps, and reports them to subscribers."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from mimose.costs import StepObservation
from mimose.memory import AllocatorLease, Reading
from mimose.training.collector import Collector
from mimose.training.events import Events, LaterBackward, StepRecord
from mimose.training.notifications import Notifications
from mimose.training.pending_observations import PendingObservations
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting
from mimose.training.step import Step


@dataclass(slots=True)
class Progress:
    """The progress of a run."""

    steps: int = 0
    observed_steps: int = 0
    peak_bytes: int = 0
    """The highest memory in use so far."""
    base_bytes: int = 0
    """Memory in use when the last step started."""

    def step_starts(self, reading: Reading) -> None:
        self.note_peak(reading.peak if self.steps else reading.in_use)
        self.steps += 1
        self.base_bytes = reading.in_use

    def note_peak(self, number_of_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, number_of_bytes)


class Learner:
    """Learns from the steps of one model when they are over.

    Costs go to the cost model, peaks to the reserve.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        events: Events,
        notifications: Notifications,
        allocator: AllocatorLease,
        block_count: int,
    ) -> None:
        self._scheduler = scheduler
        self._events = events
        self._notifications = notifications
        self._allocator = allocator
        self._block_count = block_count
        self._pending = PendingObservations()
        self._restarted = False
        self.progress = Progress()

    def begin_anew(self) -> None:
        """Discard all that was learned, and the observations that were not read yet."""
        self.read_observations(None)
        self._scheduler.forget()
        self._restarted = True

    def step_over(self, step: Step, setting: Setting) -> None:
        """The backward of a step is over."""
        if step.collector is not None:
            self._measured(step, step.collector, setting)
        else:
            setting.gradients.end_step()
        predicted = step.predicted_peak
        reading = _reading_after(step, setting, predicted)
        real = None if reading is None else step.real_peak(reading)
        self._events.step_over(_record_of(step, predicted, real, reading, setting.reserve.bytes))
        if reading is not None:
            self.progress.note_peak(reading.peak)
            if step.collector is None:
                setting.history.learn_reserve(reading, real or predicted)
        expected = self._scheduler.cost_model.retained.note(step.backward.retained)
        if expected and not step.after_broken:
            told = step.nesting.told_of_others
            rise = real - step.start.in_use if told and real else None
            limit = setting.budget_bytes - setting.reserve.bytes
            self._scheduler.step_over(step, rise, limit)

    def _measured(self, step: Step, collector: Collector, setting: Setting) -> None:
        """A step with a collector is over."""
        collector.backward_over(retained=step.backward.retained)
        readings, gradients = collector.readings, collector.gradients
        self.progress.observed_steps += step.observed
        self.progress.note_peak(readings.peak)
        if readings.peak > setting.budget_bytes:
            self._notifications.over_budget(step.size, readings.peak, setting.budget_bytes)
        setting.reserve.learn_unusable(readings.unusable_beyond(self.progress.peak_bytes))
        setting.gradients.end_step(existed=gradients.existed, cleared=gradients.cleared)
        cost_model = self._scheduler.cost_model
        cost_model.unused.update(collector.unused)
        if collector.gradients_allocated is not None:
            cost_model.note_gradients(*collector.gradients_allocated, allocates=gradients.most)
        teaches = step.evictor is not None and step.nesting.alone
        # A peak above the prediction, the upper end of what was measured, is always informative.
        if step.observed or teaches or readings.peak > step.predicted_peak:
            self._pending.add(step)

    def later_backward_over(self, step: Step, setting: Setting) -> None:
        """Another backward through a step's graph is over; its peak counts for the step."""
        reading = setting.meter.read()
        self.progress.note_peak(reading.peak)
        planned = step.collector is None
        real = step.real_peak(reading) if planned else None
        self._events.later_backward_over(
            LaterBackward(
                reading=reading,
                predicted_peak_bytes=step.predicted_peak if planned else None,
                real_peak_bytes=real,
                comparable=planned and step.comparable,
            )
        )
        key = step.decision.key
        if step.collector is not None:
            self._scheduler.later_backward_over(step.collector.readings.peak, reading.peak, 0)
        elif real is not None and key is not None and key.retained:
            self._scheduler.later_backward_over(step.predicted_peak, real, key.later_bytes)

    def read_observations(self, setting: Setting | None) -> None:
        """Learn from new observed steps, and from times that the device has measured since."""
        if not self._pending:
            return
        # Late times first: those that are predicted for new observations follow from them.
        for pending in self._pending.late():
            observation = pending.observation()
            assert observation is not None
            assert pending.cost_model is not None
            pending.cost_model.take_times(observation)
            self._events.timed(observation, pending.regime)
        for pending in self._pending.new():
            collector, cost_model = pending.collector, self._scheduler.cost_model
            observation = pending.observation()
            cost_model.note_order(pending.step.size.layout, collector.pattern)
            if collector.without_backward:
                cost_model.note_without_backward(collector.without_backward)
            if observation is not None:
                first = pending.step.tried_blocks
                if not collector.timed:
                    observation = cost_model.with_predicted_times(observation)
                self._learn(replace(observation, provisional=first), setting)
                pending.cost_model, pending.regime = cost_model, self._scheduler.regime

    def _learn(self, observation: StepObservation, setting: Setting | None) -> None:
        was_ready, began = self._scheduler.cost_model.ready, time.perf_counter()
        invalidated = self._scheduler.learn(observation)
        seconds = time.perf_counter() - began
        self._events.learned(observation, anew=invalidated or self._restarted, seconds=seconds)
        self._restarted = False
        if invalidated:
            self._notifications.changed(f"input {observation.size} costs more or less than before")
        elif self._scheduler.cost_model.ready and not was_ready and setting is not None:
            reason = self._allocator.reason_not_configured
            observed = self.progress.observed_steps
            self._notifications.planning_begins(setting, self._block_count, observed, reason)


def _reading_after(step: Step, setting: Setting, predicted_peak: int) -> Reading | None:
    if step.collector is None:
        return setting.history.reading_after(predicted_peak)
    readings = step.collector.readings
    return setting.meter.read()._replace(peak=readings.peak, peak_held=readings.peak_held)


def _record_of(
    step: Step,
    predicted_peak: int,
    real_peak: int | None,
    end: Reading | None,
    reserve_bytes: int,
) -> StepRecord:
    trusted, bounded = step.trusted, step.decision.bounded
    return StepRecord(
        size=step.size,
        plan=step.done_plan if step.has_plan else None,
        new_plan=step.decision.new,
        observed=step.observed or not step.has_plan,
        predicted_peak_bytes=predicted_peak if trusted or bounded else None,
        is_bound=bounded,
        real_peak_bytes=real_peak,
        peak_bytes=None if end is None else end.peak,
        peak_held_bytes=None if end is None else end.peak_held,
        reserve_bytes=reserve_bytes,
        comparable=trusted and step.comparable,
        evictions=0 if step.evictor is None else len(step.evictor.evicted),
        surprises=frozenset(step.surprises),
    )
