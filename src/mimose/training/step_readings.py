"""Memory readings of one observed step."""

from __future__ import annotations

import torch

from mimose.memory import Meter, Reading


class StepReadings:
    """Reads memory in use, and the peak between every two readings."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._held_before = self._held_now = meter.read().held
        self.peak = self.peak_held = 0
        """The highest reading of the step."""
        self._borrowed: list[torch.Tensor] = []

    def read(self) -> Reading:
        """The memory in use, and its peak since the last call."""
        self._borrowed = []  # they count for the peak, but not for the memory in use
        reading = self._meter.read_and_reset()
        self.peak = max(self.peak, reading.peak)
        self.peak_held = max(self.peak_held, reading.peak_held)
        self._held_now = reading.held
        return reading

    def drop_peak(self) -> None:
        """Discard the peak since the last reading."""
        self._meter.reset_peak()

    def borrow(self, tensors: list[torch.Tensor]) -> None:
        """Hold these tensors until the next reading, as if the run that saves them were kept."""
        self._borrowed = tensors

    def unusable_beyond(self, highest_bytes: int) -> int:
        """Bytes held beyond the highest use of the run so far; 0 if the allocator did not grow.

        Memory below that use is not counted: it was usable before, so the allocator can free it.
        """
        if self._held_now <= self._held_before:
            return 0
        return max(0, self._held_now - max(self.peak, highest_bytes))
