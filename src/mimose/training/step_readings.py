"""Memory readings of one step that is observed."""

from __future__ import annotations

import torch

from mimose.memory import Meter, Reading


class StepReadings:
    """Reads memory, with a peak of its own for each stretch between two readings."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._held_before = self._held_now = meter.read().held
        self.peak = self.peak_held = 0
        """The highest of the step."""
        self._borrowed: list[torch.Tensor] = []

    def read(self) -> Reading:
        """What is in use, and the peak since this was last asked."""
        self._borrowed = []  # they are in the peak, but what is in use is read without them
        reading = self._meter.read_and_reset()
        self.peak = max(self.peak, reading.peak)
        self.peak_held = max(self.peak_held, reading.peak_held)
        self._held_now = reading.held
        return reading

    def drop_peak(self) -> None:
        """What has peaked since the last reading does not count."""
        self._meter.reset_peak()

    def borrow(self, tensors: list[torch.Tensor]) -> None:
        """Hold these until the next reading, as if the run that saves them were kept."""
        self._borrowed = tensors

    def unusable_beyond(self, highest_bytes: int) -> int:
        """What the allocator holds beyond the highest use of the run, if this step made it grow.

        What was cached before, up to that use, was of use then: it can be given back.
        """
        if self._held_now <= self._held_before:
            return 0
        return max(0, self._held_now - max(self.peak, highest_bytes))
