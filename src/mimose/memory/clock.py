"""Measure time on a device without synchronizing with it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks points in the device's work and measures the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_device = device.type == "cuda"
        self._stream: Any = None

    def follow_stream(self) -> None:
        """From now on, mark points in the stream that is current now.

        Asking for it at each mark would take longer than the mark.
        """
        if self._on_device:
            self._stream = torch.cuda.current_stream(self.device)

    def mark(self) -> Any:
        """Mark the current point in the device's work."""
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, start: Any, end: Any) -> float | None:
        """The time between two marks; None until the device has reached the second."""
        if not self._on_device:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3 if end.query() else None
