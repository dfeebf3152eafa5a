"""How well a bound predicts the peaks of observed steps, and where it can therefore be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mimose.estimation.kinks import Kinks
from mimose.estimation.rows import Floats

_TRUSTED_ERROR = 0.02
"""Predictions are trusted up to this leave-one-out error of peaks, as a fraction: the most that a
peak is too low, plus the average by which peaks are too high."""
VISIBLE_KINK = 0.0001
"""A quantity has kinks if its leave-one-out error, as a fraction of the peak, is larger. Memory
follows polynomials up to the allocator's rounding. Between observed sizes, the error at a kink is
several times larger than the errors at those sizes."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of the quantities with kinks, and the errors of the peaks that it leads to."""

    kinks: Kinks
    errors: Floats
    """Leave-one-out errors of the peaks of `kinks.inner`, as fractions; positive if predicted too
    high. One row for each observation; columns: all runs kept, all recomputed."""
    margins: list[float | None]
    """By which fraction to raise predictions in each of `kinks.intervals` so that they are not too
    low; None where they cannot be trusted."""

    @classmethod
    def of(cls, kinks: Kinks, errors: Floats) -> Bound:
        extremes = zip(errors.min(1).tolist(), errors.max(1).tolist(), strict=True)
        of = dict(zip(kinks.inner, extremes, strict=True))
        near = ([of[i] for i in interval if i in of] for interval in kinks.intervals)
        return cls(kinks, errors, list(map(_margin_of, near)))

    @property
    def error(self) -> float:
        """The largest error, as a fraction."""
        return float(np.abs(self.errors).max(initial=0))

    @property
    def shortfall(self) -> float:
        """The most that a peak was predicted too low, as a fraction."""
        return float(np.maximum(-self.errors, 0).max(initial=0))

    @property
    def trusted(self) -> bool:
        """Whether predictions can be trusted in at least half of the intervals."""
        return 2 * self.margins.count(None) <= len(self.margins)


def _margin_of(errors: list[tuple[float, float]]) -> float | None:
    """The fraction by which to raise predictions with these (lowest, highest) errors of peaks; None
    if raised predictions would be too high to be trusted."""
    if not errors:
        return 0.0
    shortfall = -min(0.0, *(low for low, _ in errors))
    excess = sum(max(0.0, high) for _, high in errors) / len(errors)
    if shortfall + excess > _TRUSTED_ERROR:
        return None
    return shortfall if shortfall > VISIBLE_KINK else 0.0
