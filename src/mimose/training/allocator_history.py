"""What the allocator did in past steps: failures, retries, and cached memory in the way."""

from __future__ import annotations

from mimose.memory import Meter, Reading, Reserve

_WARY_STEPS = 16
"""Planned steps after which a failure is forgotten."""


class AllocatorHistory:
    """Reads memory after steps, teaches the reserve, and makes room after failures."""

    def __init__(self, budget_bytes: int, meter: Meter, reserve: Reserve, reading: Reading) -> None:
        self._budget_bytes = budget_bytes
        self.meter = meter
        self.reserve = reserve
        self._last = reading
        self._peak_held = reading.peak_held
        self._steps = 0
        self._unread: int | None = None
        """The peak of the last step, if memory was not read at its end."""
        self._failed_at: int | None = None
        """The predicted peak of the smallest step that has failed lately."""
        self._wary_steps = 0
        self._untidy = False
        """Whether more is lost between tensors than is reserved for."""

    def step_begins(self, reading: Reading) -> None:
        """Learn what the allocator did in the last step, if memory was not read at its end."""
        if self._unread is not None:
            self.learn_reserve(reading, self._unread)

    def reading_after(self, predicted_peak: int) -> Reading | None:
        """A reading at the end of a step that was to peak there, if it may tell anything.

        Far from the limit there is nothing to learn from most steps, and reading takes time.
        """
        self._steps += 1
        near = predicted_peak >= 0.9 * (self._budget_bytes - self.reserve.bytes)
        if near or self.meter.private or self._steps % 8 == 0:
            return self.meter.read()
        self._unread = predicted_peak
        return None

    def forward_over(self, predicted_peak: int) -> None:
        """A planned step's forward is done that is to peak there."""
        if not self.reserve.should_measure_lost(predicted_peak):
            return
        lost = self.meter.lost_bytes()
        if lost is not None:
            self._untidy = self.reserve.learn_lost(lost)

    def learn_reserve(self, reading: Reading, peak_bytes: int) -> None:
        """A planned step is over."""
        self.reserve.learn(
            peak_bytes=peak_bytes,
            held_bytes=reading.held,
            grew=reading.peak_held > self._peak_held,
            retries=reading.retries - self._last.retries,
        )
        self._unread = None
        self._peak_held = max(self._peak_held, reading.peak_held)
        if reading.failures != self._last.failures:  # rescued by a guard: for `note_failures`
            reading = reading._replace(failures=self._last.failures)
        self._last = reading

    def start_planned_step(self, reading: Reading) -> Reading:
        """The reading to measure the step's peak against."""
        if not self.meter.private:
            return reading
        self.meter.reset_peak()
        return reading._replace(peak=reading.in_use)

    def note_failures(self, reading: Reading, *, kept: bool = True) -> bool:
        """Learn from memory that has run out since this was last asked; whether it has.

        In a step that `kept` nothing, no reserve would have helped.
        How often does not matter: cuDNN fails with one engine after another until one does with
        less, and a block that is tried out fails by itself, all in one step.
        """
        if reading.failures == self._last.failures:
            return False
        if kept:
            self.reserve.ran_out()
        self._last = reading
        return True

    def forgive_failures(self) -> None:
        """What has failed could not have fitted: there is nothing to learn from it."""
        self._last = self.meter.read()

    def failed(self, peak_bytes: int) -> None:
        """A step that was to peak at so much has run out of memory."""
        self._failed_at = min(peak_bytes, self._failed_at or peak_bytes)
        self._wary_steps = _WARY_STEPS
        self.meter.release_cached()

    def make_room(self, predicted_peak: int, reading: Reading) -> None:
        """Give cached memory back before a step as large as one that has failed because of it.

        The allocator gives it back itself when it runs short, but in the middle of a step what is
        cached lies between tensors that are in use. The host waits for the device meanwhile, so it
        is done once for a failure, and only where what is cached may be in the way; and once where
        more is lost between tensors than is reserved for.
        """
        if self._untidy and self.reserve.near_limit(predicted_peak):
            self._untidy = False
            self.meter.release_cached()
            return
        if self._failed_at is None:
            return
        self._wary_steps -= 1
        cached = reading.held - reading.in_use
        in_the_way = cached > 0 and predicted_peak + cached > self._budget_bytes
        if predicted_peak >= self._failed_at and in_the_way:
            self.meter.release_cached()
            self._failed_at = None
        elif not self._wary_steps:
            self._failed_at = None
