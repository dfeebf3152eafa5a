"""Fit all quantities of all runs at once, and predict a profile at any size.

Each quantity (in bytes) is a polynomial of the varying dimensions: a constant plus the batch size
times monomials of the other dimensions up to degree two, or times areas that are counted in strides
(`areas.py`). The fit is linear least squares.

Levels follow the polynomials exactly. A peak is the maximum of several levels, so it has kinks that
no polynomial follows. Where a quantity's leave-one-out error shows that it does not follow the fit,
its upper bound by the observations is used (`kinks.py`).

Whether predictions are trusted depends on the peaks of the observed steps: how well does a fit of
the other observations predict each of them?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mimose.costs import InputSize, Profile, StepObservation
from mimose.estimation.dimensions import Shape
from mimose.estimation.kinks import Kinks, NeighbourBound, ResidualBound
from mimose.estimation.regression import Regression
from mimose.estimation.rows import (
    BYTES,
    OF_STEP,
    SAVED,
    Floats,
    Mask,
    peaks,
    profile_of,
    row_of,
    signed,
    signs_of,
)
from mimose.estimation.seen import Seen
from mimose.estimation.times import Times

_TRUSTED_ERROR = 0.02
"""Predictions are trusted up to this leave-one-out error of peaks, as a fraction: the most that a
peak is too low, plus the average by which peaks are too high."""
_TO_DOUBT = 4
"""Observations needed to consider that the first dimension may not be the batch."""
_EXACT_ERROR = 0.001
"""The error, as a fraction of the peak, up to which a fit counts as exact."""
_VISIBLE_KINK = 0.0001
"""A quantity has kinks if its leave-one-out error, as a fraction of the peak, is larger. Memory
follows polynomials up to the allocator's rounding. Between observed sizes, the error at a kink is
several times larger than the errors at those sizes."""
_REACH = 0.02
"""How far predictions reach beyond the largest observed size, as a fraction of it."""
_EXACT_REACH = 0.1
"""The same for a fit without a visible error."""
_MOST_UNCERTAIN = 0.25
"""The largest uncertainty, as a fraction of the peak, of an extrapolation that is reported."""
_PER_SIZE = 0.1
"""The least uncertainty of an extrapolation to twice the largest observed size; proportional for
other sizes. Another moment of the step may have become the peak: an encoder was off by 9 % at twice
the largest size."""
_STEEPEST = 6
"""Memory grows with at most this power of a dimension; attention over square images: the fourth."""


@dataclass(slots=True)
class Fit:
    """The fit of all observations of one pattern, and where its predictions can be trusted."""

    regression: Regression
    seen: Seen
    kinked: Mask
    """Which quantities do not follow the regression; `kinks` bounds them."""
    kinks: Kinks
    errors: Floats
    """Leave-one-out errors of the observed peaks, as fractions; positive if predicted too high. One
    row for each observation; columns: all runs kept, all recomputed."""
    margins: list[float | None]
    """By which fraction to raise predictions in each of `Kinks.intervals` so that they are not too
    low; None where they cannot be trusted."""
    times: Times
    fixed: tuple[bool, ...]
    movable: tuple[bool, ...]
    """Whether the input of each run can be moved, as in the latest observation."""

    @property
    def shape(self) -> Shape:
        return self.regression.shape

    @property
    def error(self) -> float:
        """The largest leave-one-out error of the peaks, as a fraction."""
        return float(np.abs(self.errors).max(initial=0))

    @property
    def shortfall(self) -> float:
        """The most that a peak was predicted too low in leave-one-out, as a fraction."""
        return float(np.maximum(-self.errors, 0).max(initial=0))

    @property
    def exact(self) -> bool:
        return self.error <= _EXACT_ERROR

    @property
    def trusted(self) -> bool:
        """Whether predictions can be trusted in at least half of the intervals."""
        return 2 * self.margins.count(None) <= len(self.margins)

    # Fitting

    @classmethod
    def of(cls, observations: list[StepObservation]) -> Fit | None:
        """The fit with the shape that explains the observations best."""
        default = Shape.of([o.size for o in observations])
        values = np.array([row_of(o.profile) for o in observations], float)
        if len(observations) < _TO_DOUBT:
            return cls._best_of([default], observations, values)
        best, enough = None, False
        for shapes in default.candidates():
            fit = cls._best_of(shapes, observations, values)
            enough |= fit is not None and fit.shape == default
            if best is None or (fit is not None and fit.error < best.error):
                best = fit
            if best is not None and (best.exact or (enough and best.trusted)):
                return best
        # With too few observations for the default shape, another shape must fit exactly: many
        # shapes seem to explain sizes that lie near one line.
        return best if enough else None

    @classmethod
    def _best_of(
        cls, shapes: list[Shape], observations: list[StepObservation], values: Floats
    ) -> Fit | None:
        """The fit with the shape, out of these, that leaves the fewest bytes unexplained."""
        found = (Regression.of(s, [s.point(o.size) for o in observations], values) for s in shapes)
        best = min(filter(None, found), key=lambda r: r.unexplained, default=None)
        return None if best is None else cls._with(best, observations, values)

    @classmethod
    def _with(
        cls, regression: Regression, observations: list[StepObservation], values: Floats
    ) -> Fit:
        fixed = tuple(run.fixed for run in observations[-1].runs)
        real, predicted, signs = peaks(fixed, values), regression.left_out, signs_of(len(fixed))
        visible = _VISIBLE_KINK * real[:, 0]
        kinked: Mask = np.any(np.abs(values - predicted) > visible[:, None], axis=0)
        kinked[-1] = False  # the prelude: no peak depends on it, so the estimate needs no bound
        kinks = _kinks_of(regression, values, signs, visible)
        predicted = np.where(kinked, kinks.left_out * signs, predicted)
        # The smallest and the largest observation do not count: without them the fit would have to
        # reach beyond its range, which predictions never do.
        total = values.sum(1)
        inner = sorted({*range(len(values))} - {int(total.argmin()), int(total.argmax())})
        errors = peaks(fixed, predicted[inner]) / real[inner] - 1
        extremes = dict(zip(inner, zip(errors.min(1), errors.max(1), strict=True), strict=True))
        by_interval = [[extremes[i] for i in near if i in extremes] for near in kinks.intervals]
        return cls(
            regression=regression,
            seen=Seen.of(regression.shape, regression.points, values),
            kinked=kinked,
            kinks=kinks,
            errors=errors,
            margins=list(map(_margin_of, by_interval)),
            times=Times.of(observations),
            fixed=fixed,
            movable=tuple(run.input_movable for run in observations[-1].runs),
        )

    def take_times(self, observations: list[StepObservation]) -> None:
        """Update the times from the same observations, whose bytes have not changed."""
        self.times = Times.of(observations)

    # Predicting

    def predict(self, size: InputSize, *, upper_bound: bool = False) -> Profile | None:
        """The profile at a size within the observed range or a little beyond; None further out.

        With `upper_bound`, each quantity is an upper bound by the observations, for noisy models.
        """
        point = self.shape.covering_point(size)
        reach = _EXACT_REACH if self.shortfall <= _EXACT_ERROR else _REACH
        if point is None or (beyond := self.seen.beyond(self.shape.extent(point))) > reach:
            return None
        row = self.regression.predict(point)
        row = self._bounded(point, row) if upper_bound else self._raised(point, row)
        if beyond > 0:
            row = row * (1 + beyond * 0.5)
            if len(point) == 1:  # a fit of sizes that are close together may rise steeply
                row = np.minimum(row, self.seen.values.max(0) * (1 + beyond) ** _STEEPEST)
        return self._profile(size, row)

    def _raised(self, point: Sequence[float], row: Floats) -> Floats:
        """The row, raised so that no peak is too low; subtracted quantities are not raised."""
        row, signs = self._within_neighbours(point, row), signs_of(len(self.fixed))
        if self.kinked.any():
            bound = self.kinks.upper_bound(point, row * signs) * signs
            row = np.where(self.kinked, bound, row)
        margin = self.margins[self.kinks.interval(point)]
        return np.where(signs > 0, row * (1 + margin), row) if margin else row

    def _bounded(self, point: Sequence[float], row: Floats) -> Floats:
        """The row with all quantities bounded, as if none followed the regression."""
        signs = signs_of(len(self.fixed))
        bound = ResidualBound.of(self.regression.left_out * signs, self.seen.values * signs)
        return bound.upper_bound(point, row * signs) * signs

    def _within_neighbours(self, point: Sequence[float], row: Floats) -> Floats:
        may_be_negative = signed(len(self.fixed))
        return self.seen.within_neighbours(point, row, ~self.kinked, ~may_be_negative)

    def _profile(self, size: InputSize, row: Floats) -> Profile:
        least = np.where(signed(len(self.fixed)), -np.inf, 0.0)
        numbers: list[int] = np.maximum(row, least).round().astype(np.int64).tolist()
        others = [
            (
                self.times.recompute.nanoseconds(k, saved),
                fixed,
                movable,
                self.times.backward.nanoseconds(k, saved),
            )
            for k, (saved, fixed, movable) in enumerate(
                zip(numbers[SAVED:-OF_STEP:BYTES], self.fixed, self.movable, strict=True)
            )
        ]
        return profile_of(size, numbers, others)

    # Where predictions can be trusted

    def trusted_at(self, size: InputSize) -> bool:
        """Whether the prediction at a size can be trusted, judging by the observations near it."""
        point = self.shape.covering_point(size)
        if point is None or not self.trusted:
            return False
        return self.margins[self.kinks.interval(point)] is not None

    def between(self, size: InputSize) -> bool:
        """Whether a size is within the observed range. Below it a quantity may have an unobserved
        kink."""
        point = self.shape.covering_point(size)
        return point is not None and self.seen.between(self.shape.extent(point))

    def beyond(self, size: InputSize) -> float:
        """How far a size is beyond the largest observed one, as a fraction of it.

        It is inf if the size exceeds a dimension that never varied.
        """
        point = self.shape.covering_point(size)
        return math.inf if point is None else self.seen.beyond(self.shape.extent(point))

    def inside(self, size: InputSize) -> bool:
        """Whether a size has exactly this shape and is within the observed range."""
        return self.shape.describes(size) and self.between(size)

    # What-if questions

    def extrapolate(self, size: InputSize) -> tuple[Profile, float] | None:
        """The profile at a size beyond those observed, and the relative uncertainty of its peaks.

        For what-if questions, not for plans: assumes that memory keeps growing as it did between
        observed sizes. None if the uncertainty is too large.
        """
        point = self.shape.covering_point(size)
        if point is None or not self.trusted:
            return None
        row = self._within_neighbours(point, self.regression.predict(point))
        uncertainty = max(self._uncertainty(point, row), _PER_SIZE * self.beyond(size))
        if uncertainty > _MOST_UNCERTAIN:
            return None
        return self._profile(size, row), uncertainty

    def _uncertainty(self, point: Sequence[float], row: Floats) -> float:
        """Three standard errors of the peak, relative: the larger of all kept, all recomputed."""
        features = [self.shape.features(each) for each in (*self.regression.points, point)]
        used = np.array(features)[:, self.shape.choices(len(features[0]))[0]]
        observed, new = used[:-1], used[-1]
        real, inverse = peaks(self.fixed, self.seen.values), np.linalg.pinv(observed)
        residual = real - observed @ (inverse @ real)
        spread = np.sqrt((residual**2).sum(0) / max(1, len(observed) - observed.shape[1]))
        leverage = 1 + ((new @ inverse) ** 2).sum()
        return float((3 * spread * np.sqrt(leverage) / peaks(self.fixed, row[None])[0]).max())


def _kinks_of(regression: Regression, values: Floats, signs: Floats, visible: Floats) -> Kinks:
    """Bounds by neighbouring sizes if one dimension varies, else by the errors at all sizes."""
    predicted, values = regression.left_out * signs, values * signs
    if len(regression.points[0]) == 1:
        return NeighbourBound.of([x for (x,) in regression.points], predicted, values, visible)
    return ResidualBound.of(predicted, values)


def _margin_of(errors: list[tuple[float, float]]) -> float | None:
    """The fraction by which to raise predictions with these (lowest, highest) errors of peaks; None
    if raised predictions would be too high to be trusted."""
    if not errors:
        return 0.0
    shortfall = -min(0.0, *(low for low, _ in errors))
    excess = sum(max(0.0, high) for _, high in errors) / len(errors)
    if shortfall + excess > _TRUSTED_ERROR:
        return None
    return shortfall if shortfall > _VISIBLE_KINK else 0.0
