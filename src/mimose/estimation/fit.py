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
from dataclasses import dataclass, replace

import numpy as np

from mimose.costs import InputSize, Profile, StepObservation
from mimose.estimation.bounds import VISIBLE_KINK, Bound
from mimose.estimation.dimensions import Shape
from mimose.estimation.kinks import Kinks, ResidualBound, kinks_of
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

_TO_DOUBT = 4
"""Observations needed to consider that the first dimension may not be the batch."""
_EXACT_ERROR = 0.001
"""The error, as a fraction of the peak, up to which a fit counts as exact."""
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
    """Which quantities do not follow the regression; `bounds` bound them."""
    bounds: list[Bound]
    """The closest first; the last one is the widest. Of the bounds that hold at a size, the first
    that can be trusted there counts, or else the first."""
    times: Times
    fixed: tuple[bool, ...]
    movable: tuple[bool, ...]
    """Whether the input of each run can be moved, as in the latest observation."""
    supported: bool = True
    """Whether the observations are enough for the default shape. If not, predictions are not
    trusted."""

    @property
    def shape(self) -> Shape:
        return self.regression.shape

    @property
    def error(self) -> float:
        """The largest leave-one-out error of the peaks, as a fraction, under the widest bound."""
        return self.bounds[-1].error

    @property
    def shortfall(self) -> float:
        """The most that a peak was predicted too low in leave-one-out, as a fraction."""
        return max(bound.shortfall for bound in self.bounds)

    @property
    def exact(self) -> bool:
        return self.error <= _EXACT_ERROR

    @property
    def trusted(self) -> bool:
        """Whether predictions can be trusted in at least half of the intervals of a bound."""
        return self.supported and any(bound.trusted for bound in self.bounds)

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
            if best is not None and (best.exact or (enough and best.bounds[-1].trusted)):
                return best
        # With too few observations for the default shape, another shape must fit exactly: many
        # shapes seem to explain sizes that lie near one line.
        return best if enough else cls._along_line(default, observations, values)

    @classmethod
    def _along_line(
        cls, default: Shape, observations: list[StepObservation], values: Floats
    ) -> Fit | None:
        """The fit for sizes on a line, from one observation less than the default shape needs.

        Off the line, bytes that follow the batch alone would be missed.
        """
        fit = cls._best_of([replace(default, batch_alone=False)], observations, values)
        if fit is None or len(fit.bounds) == 1:
            return None
        return replace(fit, bounds=fit.bounds[:1], supported=False)

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
        visible = VISIBLE_KINK * real[:, 0]
        kinked: Mask = np.any(np.abs(values - predicted) > visible[:, None], axis=0)
        kinked[-1] = False  # the prelude: no peak depends on it, so the estimate needs no bound
        bounds = []
        for kinks in kinks_of(regression.points, predicted * signs, values * signs, visible):
            left_out, inner = np.where(kinked, kinks.left_out * signs, predicted), kinks.inner
            bounds.append(Bound.of(kinks, peaks(fixed, left_out[inner]) / real[inner] - 1))
        return cls(
            regression=regression,
            seen=Seen.of(regression.shape, regression.points, values),
            kinked=kinked,
            bounds=bounds,
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
        if (bound := self._bound_at(point)) is None:
            return None
        row = self.regression.predict(point)
        row = self._bounded(point, row) if upper_bound else self._raised(point, row, *bound)
        if beyond > 0:
            row = row * (1 + beyond * 0.5)
            if len(point) == 1:  # a fit of sizes that are close together may rise steeply
                row = np.minimum(row, self.seen.values.max(0) * (1 + beyond) ** _STEEPEST)
        return self._profile(size, row)

    def _bound_at(self, point: Sequence[float]) -> tuple[Kinks, float | None] | None:
        """The bound of quantities with kinks at a size, and the margin; None if no bound holds."""
        at = [(bound, bound.kinks.interval(point)) for bound in self.bounds]
        holding = [(bound.kinks, bound.margins[k]) for bound, k in at if k is not None]
        trusted = (each for each in holding if each[1] is not None)
        return next(trusted, holding[0] if holding else None)

    def _raised(
        self, point: Sequence[float], row: Floats, kinks: Kinks, margin: float | None
    ) -> Floats:
        """The row, raised so that no peak is too low; subtracted quantities are not raised."""
        row, signs = self._within_neighbours(point, row), signs_of(len(self.fixed))
        if self.kinked.any():
            bound = kinks.upper_bound(point, row * signs) * signs
            row = np.where(self.kinked, bound, row)
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
        bound = self._bound_at(point)
        return bound is not None and bound[1] is not None

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
