"""How well predictions have matched recent steps."""

from __future__ import annotations

from collections import deque

from mimose.costs import InputSize

_WINDOW = 64
"""The number of planned steps whose peaks are remembered."""
_TOLERATED = 0.03
"""A larger deviation from the predicted rise, as a fraction of it, is a reason to observe again."""
_MOST_SURPRISES = 16
"""After this many surprises, further ones count as normal: they do not cause observations."""


class Reliability:
    """Tracks surprises, and derives how much to trust the predictions of one cost model.

    Peaks above their predictions increase the uncertainty that plans leave room for. A surprise
    makes predictions suspect until a step has been observed. If that observation agrees with the
    predictions, the tolerance for deviating peaks doubles.
    """

    def __init__(self) -> None:
        self._shortfalls: deque[float] = deque(maxlen=_WINDOW)
        self.uncertainty = 0.0
        """The largest recent excess of a real rise over the predicted one, as a fraction."""
        self._tolerated = _TOLERATED
        self.surprises = 0
        self._suspect = False
        self._doubted_peak = False
        self._failed_at: InputSize | None = None
        """The size of a step in which memory ran out, until one as large was observed."""

    def suspects(self, size: InputSize) -> bool:
        """Whether a step of this size should be observed, even if its prediction is trusted."""
        return self._suspect or (self._failed_at is not None and self._failed_at <= size)

    @property
    def doubted(self) -> bool:
        """Whether the costs may have changed since they were learned."""
        return self._doubted_peak

    def peaked(self, predicted_rise: int, real_rise: int, *, matters: bool = True) -> None:
        """A step peaked `real_rise` bytes above its start.

        `matters` is whether a deviation is worth observing a step again.
        """
        if predicted_rise <= 0:
            return
        share = (real_rise - predicted_rise) / predicted_rise
        self._shortfalls.append(max(0.0, share))
        self.uncertainty = max(self._shortfalls)
        if matters and abs(share) > self._tolerated:
            self._doubted_peak = True
            self.surprised()

    def surprised(self) -> None:
        """An event happened that a plan did not expect."""
        if self.surprises < _MOST_SURPRISES:
            self.surprises += 1
            self._suspect = True

    def failed(self, size: InputSize) -> None:
        """Memory ran out in a step of this size that was predicted to fit."""
        self._failed_at, self._doubted_peak = size, True
        self.surprised()

    def observed(self, size: InputSize) -> None:
        """A step of this size was observed, and agrees with the older observations."""
        if self._doubted_peak:
            self._tolerated *= 2
        self._suspect = self._doubted_peak = False
        if self._failed_at is not None and self._failed_at <= size:
            self._failed_at = None
