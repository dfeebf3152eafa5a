"""What the allocator did in past steps: failures, retries, growth of the cache."""

from __future__ import annotations

from mimose.memory import Meter, Reading, Reserve

_STEPS_UNTIL_FORGOTTEN = 16
"""The number of planned steps after which a failure is forgotten."""


class AllocatorHistory:
    """Reads memory after steps, updates the reserve, and frees cached memory after failures."""

    def __init__(self, budget_bytes: int, meter: Meter, reserve: Reserve, reading: Reading) -> None:
        self._budget_bytes = budget_bytes
        self.meter = meter
        self.reserve = reserve
        self._last = reading
        self._peak_held = reading.peak_held
        self._steps = 0
        self._unread_peak: int | None = None
        """The predicted peak of the last step, if memory was not read at its end."""
        self._failed_at: int | None = None
        """The lowest predicted peak of the steps that failed recently."""
        self._steps_to_remember = 0
        """Planned steps until the failure is forgotten."""
        self._lost_too_much = False
        """Whether more memory is lost between tensors than the reserve covers."""

    def step_begins(self, reading: Reading) -> None:
        """Learn from the last step now, if memory was not read at its end."""
        if self._unread_peak is not None:
            self.learn_reserve(reading, self._unread_peak)

    def reading_after(self, predicted_peak: int) -> Reading | None:
        """Read memory at the end of a step with this predicted peak, if it may be informative.

        Reading takes time. Far from the limit, only every eighth step is read at its end, unless
        the meter is private.
        """
        self._steps += 1
        near = predicted_peak >= 0.9 * (self._budget_bytes - self.reserve.bytes)
        if near or self.meter.private or self._steps % 8 == 0:
            return self.meter.read()
        self._unread_peak = predicted_peak
        return None

    def forward_over(self, predicted_peak: int) -> None:
        """The forward of a planned step with this predicted peak is over."""
        if not self.reserve.should_measure_lost(predicted_peak):
            return
        lost = self.meter.lost_bytes()
        if lost is not None:
            self._lost_too_much = self.reserve.learn_lost(lost)

    def learn_reserve(self, reading: Reading, peak_bytes: int) -> None:
        """Update the reserve after a planned step that peaked at `peak_bytes`."""
        self.reserve.learn(
            peak_bytes=peak_bytes,
            held_bytes=reading.held,
            grew=reading.peak_held > self._peak_held,
            retries=reading.retries - self._last.retries,
        )
        self._unread_peak = None
        self._peak_held = max(self._peak_held, reading.peak_held)
        if reading.failures != self._last.failures:
            # The step survived these failures; leave them for `note_failures`.
            reading = reading._replace(failures=self._last.failures)
        self._last = reading

    def start_planned_step(self, reading: Reading, plan_bytes: int) -> Reading:
        """Make room for a step that adds `plan_bytes`, and reset the peak if the meter is private.

        Returns the reading to compare the step's peak with.
        """
        if self._lost_too_much or self._failed_at is not None:
            self.make_room(reading.in_use + plan_bytes, reading)
        if not self.meter.private:
            return reading
        self.meter.reset_peak()
        return reading._replace(peak=reading.in_use)

    def has_failed_since(self, reading: Reading) -> bool:
        """Whether memory ran out between the last call of `note_failures` and this reading."""
        return reading.failures != self._last.failures

    def note_failures(self, reading: Reading, *, kept: bool = True) -> bool:
        """Whether memory ran out since the last call; if so, enlarge the reserve.

        The reserve stays the same if the step `kept` nothing: a larger one would not have helped.
        The number of failures does not matter. In one step cuDNN may fail with several engines
        before one succeeds with less memory, and a block may fail while it is being tried.
        """
        if not self.has_failed_since(reading):
            return False
        if kept:
            self.reserve.ran_out()
        self._last = reading
        return True

    def forgive_failures(self) -> None:
        """Learn nothing from the failures so far: no plan could have avoided them."""
        self._last = self.meter.read()

    def failed(self, peak_bytes: int) -> None:
        """A step with this predicted peak ran out of memory."""
        self._failed_at = min(peak_bytes, self._failed_at or peak_bytes)
        self._steps_to_remember = _STEPS_UNTIL_FORGOTTEN
        self.meter.release_cached()

    def make_room(self, predicted_peak: int, reading: Reading) -> None:
        """Free cached memory before a step that might otherwise run out of memory.

        The allocator frees its cache when it runs short, but in the middle of a step the cached
        memory lies between tensors that are in use. Freeing it makes the host wait for the device,
        so it is done once after a failure, before a step that is at least as large and does not
        fit beside the cache; and once if more memory is lost between tensors than the reserve
        covers.
        """
        if self._lost_too_much and self.reserve.near_limit(predicted_peak):
            self._lost_too_much, self._failed_at = False, None
            self.meter.release_cached()
            return
        if self._failed_at is None:
            return
        self._steps_to_remember -= 1
        cached = reading.held - reading.in_use
        exceeds_budget = cached > 0 and predicted_peak + cached > self._budget_bytes
        if predicted_peak >= self._failed_at and exceeds_budget:
            self.meter.release_cached()
            self._failed_at = None
        elif not self._steps_to_remember:
            self._failed_at = None
