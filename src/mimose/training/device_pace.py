"""How fast blocks run in planned steps, compared with their observed times.

Observed blocks run under hooks. If launching kernels takes longer than running them, the device
waits for the host, and the measured times are too long: on an H200, layers of 2.5 ms took 5 ms. The
choice between keeping and recomputing is not affected, since it compares such times with each
other. But plans hide copies to the host behind these times. So the whole forwards of some planned
steps are timed, by two events each.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from mimose.costs import InputSize, Profile
from mimose.memory import Clock

_MOST_SIZES = 64
_NEIGHBOURS = 3
_CHANGE = 0.2
"""The relative change of the pace above which new plans are made."""


class ForwardTimer:
    """Times the forward of one planned step."""

    __slots__ = ("_begun", "_clock", "_ended", "observed_seconds")

    def __init__(self, clock: Clock, observed_seconds: float) -> None:
        self._clock = clock
        self.observed_seconds = observed_seconds
        """The sum of the observed times of its blocks."""
        self._begun = clock.mark()
        self._ended: Any = None

    def stop(self) -> None:
        """The last block has returned."""
        if self._ended is None:
            self._ended = self._clock.mark()

    @property
    def stopped(self) -> bool:
        return self._ended is not None

    @property
    def seconds(self) -> float | None:
        """The measured time; None until the device has finished."""
        return None if self._ended is None else self._clock.seconds(self._begun, self._ended)


class DevicePace:
    """The time of planned forwards, as a share of the observed times of their blocks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shares: dict[InputSize, tuple[float, float]] = {}
        """By size: the observed seconds, and the share of these that a planned forward took."""
        self._running: tuple[InputSize, ForwardTimer] | None = None

    def is_new(self, size: InputSize) -> bool:
        """Whether no step of this size was timed yet, and no timing waits for the device."""
        waits = self._running is not None and self._running[1].stopped
        return not waits and size not in self._shares

    def timer_for(self, size: InputSize, profile: Profile) -> ForwardTimer:
        """Start timing the forward of a planned step."""
        self._running = size, ForwardTimer(self._clock, _observed_seconds(profile))
        return self._running[1]

    def read(self) -> bool:
        """Read the running timer, if the device has finished; whether the pace changed."""
        if self._running is None:
            return False
        size, timer = self._running
        seconds = timer.seconds
        if seconds is None:
            return False
        self._running = None
        if not timer.observed_seconds:
            return False
        before = self._near(timer.observed_seconds)
        if len(self._shares) >= _MOST_SIZES:
            del self._shares[next(iter(self._shares))]
        # A longer time than observed is only a pause of the host.
        self._shares[size] = timer.observed_seconds, min(1.0, seconds / timer.observed_seconds)
        now = self._near(timer.observed_seconds)
        return before is None or now is None or abs(now - before) > _CHANGE * before

    def of(self, profile: Profile) -> float | None:
        """The share for a profile, from forwards of similar length; None if none was timed."""
        return self._near(_observed_seconds(profile))

    def _near(self, observed_seconds: float) -> float | None:
        if not self._shares or not observed_seconds:
            return None
        by_distance = sorted(
            self._shares.values(), key=lambda pair: abs(math.log(pair[0] / observed_seconds))
        )
        return statistics.median(share for _, share in by_distance[:_NEIGHBOURS])


def _observed_seconds(profile: Profile) -> float:
    return sum(run.nanoseconds for run in profile.runs) / 1e9
