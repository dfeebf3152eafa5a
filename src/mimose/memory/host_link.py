"""Measure the speed of copies to the host and back."""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch

from mimose.memory.copy_streams import CopyTimes
from mimose.memory.host_copies import HostMemory

_PROBE_BYTES = 32 << 20
_LARGE = 1 << 20
"""The time of a smaller copy is mostly latency."""
_CHANGE = 0.1
"""The relative change of speed that is worth making new plans."""
_CPU_SPEED = 10.0
"""Bytes per nanosecond. A CPU cannot overlap copies with compute; its plans assume this speed."""


class LinkSpeed:
    """The speed of the link in both directions, in bytes per nanosecond, measured on copies.

    Other processes may use the same link, so the speed follows the latest copies: the median of
    nine. It changes only if they differ by more than a tenth, so that plans stay valid.
    """

    def __init__(self, to_host: float = 0.0, from_host: float = 0.0) -> None:
        self.to_host, self.from_host = to_host, from_host
        self._latest: tuple[deque[float], deque[float]] = (deque(maxlen=9), deque(maxlen=9))

    @property
    def known(self) -> bool:
        return self.to_host > 0 and self.from_host > 0

    def learn(self, times: CopyTimes) -> bool:
        """Learn from these copies. Returns whether a speed has changed."""
        for latest, copies in zip(self._latest, times[:2], strict=True):
            latest.extend(n / (s * 1e9) for n, s in copies if n >= _LARGE and s > 0)
        to_host, from_host = (
            _followed(*pair) for pair in zip(self.speeds, self._latest, strict=True)
        )
        changed = (to_host, from_host) != self.speeds
        self.to_host, self.from_host = to_host, from_host
        return changed

    @property
    def speeds(self) -> tuple[float, float]:
        return self.to_host, self.from_host

    def adopt(self, to_host: float, from_host: float) -> None:
        """Assume these speeds until copies are measured. Does nothing if speeds are known."""
        if not (0 < to_host < math.inf and 0 < from_host < math.inf):
            raise ValueError(f"speeds of a link must be positive, not {to_host} and {from_host}")
        if not self.known:
            self.to_host, self.from_host = float(to_host), float(from_host)

    def probe(self, host: HostMemory) -> None:
        """Measure both directions with a test copy. Takes some milliseconds."""
        if host.device.type != "cuda":
            self.to_host = self.from_host = _CPU_SPEED
            return
        nbytes = min(_PROBE_BYTES, host.arena.limit_bytes)
        for _ in range(2):  # the first copy is slow: its pages are new to the device
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


def _followed(speed: float, latest: deque[float]) -> float:
    if not latest:
        return speed
    now = statistics.median(latest)
    return now if abs(now - speed) > _CHANGE * speed else speed
