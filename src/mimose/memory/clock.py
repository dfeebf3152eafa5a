"""How long something took on a device, without ever waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks moments; tells the time between two of them once it is known."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"

    def mark(self) -> Any:
        """This moment in the device's work."""
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float | None:
        """The time between two marks; None while the device has not got there yet."""
        if not self._on_device:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3 if end.query() else None
