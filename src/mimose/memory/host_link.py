"""How fast bytes go to the host and back."""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch

from mimose.memory.host_copies import CopyTimes, HostMemory

_PROBE_BYTES = 32 << 20
_LARGE = 1 << 20
"""Smaller copies tell more about their latency than about the link."""
_CHANGE = 0.1
"""By how much a speed must differ from the one that plans use before they are made anew."""


class LinkSpeed:
    """The speed of the link each way, in bytes per nanosecond, from copies that were made.

    Other processes may use the same link, so the speed follows the latest copies. It changes only
    if they differ by more than a tenth, so that plans last.
    """

    def __init__(self, to_host: float = 0.0, from_host: float = 0.0) -> None:
        self.to_host, self.from_host = to_host, from_host
        self._latest: tuple[deque[float], deque[float]] = (deque(maxlen=9), deque(maxlen=9))

    @property
    def known(self) -> bool:
        return self.to_host > 0 and self.from_host > 0

    def learn(self, times: CopyTimes) -> bool:
        """Follow these copies; whether a speed has changed."""
        for latest, copies in zip(self._latest, times[:2], strict=True):
            latest.extend(n / (s * 1e9) for n, s in copies if n >= _LARGE and s > 0)
        out, back = (_followed(*pair) for pair in zip(self.speeds, self._latest, strict=True))
        changed = (out, back) != self.speeds
        self.to_host, self.from_host = out, back
        return changed

    @property
    def speeds(self) -> tuple[float, float]:
        return self.to_host, self.from_host

    def adopt(self, to_host: float, from_host: float) -> None:
        """Take these speeds for granted until copies show others; not if some are known."""
        if not (0 < to_host < math.inf and 0 < from_host < math.inf):
            raise ValueError(f"speeds of a link must be positive, not {to_host} and {from_host}")
        if not self.known:
            self.to_host, self.from_host = float(to_host), float(from_host)

    def probe(self, host: HostMemory) -> None:
        """Measure both ways once, by a copy that nobody needs. Takes some milliseconds."""
        if host.device.type != "cuda":
            self.to_host = self.from_host = _CPU_SPEED
            return
        nbytes = min(_PROBE_BYTES, host.arena.limit_bytes)
        for _ in range(2):  # the first time, the pages are new to the device
            source = torch.empty(nbytes, dtype=torch.uint8, device=host.device)
            copy = host.copy(source.untyped_storage())
            if copy is None:
                return
            copy.release()
            copy.storage()
            host.stream.synchronize()
            host.moved_bytes -= nbytes
            for latest in self._latest:
                latest.clear()
            self.learn(host.stream.times())


_CPU_SPEED = 10.0
"""On a CPU nothing is hidden behind anything; plans take this speed for granted."""


def _followed(speed: float, latest: deque[float]) -> float:
    if not latest:
        return speed
    now = statistics.median(latest)
    return now if abs(now - speed) > _CHANGE * speed else speed
