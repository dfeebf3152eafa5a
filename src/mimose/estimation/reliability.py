"""Whether predictions have held lately."""

from __future__ import annotations

from collections import deque

from mimose.costs import InputSize
from mimose.estimation.prediction import Surprise

_WINDOW = 64
"""Planned steps whose peaks are remembered."""
_STRANGE = 0.03
"""A difference from the predicted rise, as a share of it, that is a reason to observe again."""
_MOST_SURPRISES = 16
"""How often surprises may make the next step an observed one before they count as normal."""


class Reliability:
    """What surprises say about the predictions of one cost model.

    Under-predicted peaks widen the uncertainty that plans leave room for. A surprise makes
    predictions suspect until a step was observed. If that observation contradicts nothing, such
    surprises are normal here, and it takes a larger one next time.
    """

    def __init__(self) -> None:
        self._shortfalls: deque[float] = deque(maxlen=_WINDOW)
        self.uncertainty = 0.0
        """The largest recent excess of a real rise over the predicted one, as a share of that."""
        self._tolerated = _STRANGE
        self.surprises = 0
        self._suspect = False
        self._doubted_peak = False
        self._failed_at: InputSize | None = None

    def suspects(self, size: InputSize) -> bool:
        """Whether a step of this size is to be observed, whatever is predicted of it."""
        return self._suspect or (self._failed_at is not None and self._failed_at <= size)

    @property
    def doubted(self) -> bool:
        """Whether what is known may have ceased to be true."""
        return self._doubted_peak

    def has_failed_at(self, size: InputSize) -> bool:
        """Whether memory ran out in a step no larger, and none as large was observed since."""
        return self._failed_at is not None and self._failed_at <= size

    def peaked(self, predicted_rise: int, real_rise: int, *, matters: bool = True) -> None:
        """A step rose this far above its start; whether a difference is worth observing again."""
        if predicted_rise <= 0:
            return
        share = (real_rise - predicted_rise) / predicted_rise
        self._shortfalls.append(max(0.0, share))
        self.uncertainty = max(self._shortfalls)
        if matters and abs(share) > self._tolerated:
            self._doubted_peak = True
            self.surprised(Surprise.PEAK_HIGHER)

    def surprised(self, surprise: Surprise) -> None:
        """Something happened that a plan did not expect."""
        if self.surprises < _MOST_SURPRISES:
            self.surprises += 1
            self._suspect = True

    def failed(self, size: InputSize) -> None:
        """Memory ran out in a step of this size that was to fit."""
        self._failed_at, self._doubted_peak = size, True
        self.surprised(Surprise.OUT_OF_MEMORY)

    def observed(self, size: InputSize) -> None:
        """A step of this size was observed, and contradicted nothing."""
        if self._doubted_peak:
            self._tolerated *= 2
        self._suspect = self._doubted_peak = False
        if self.has_failed_at(size):
            self._failed_at = None
