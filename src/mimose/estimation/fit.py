"""One fit for all runs and all quantities at once: observations in, a profile at any size out.

Bytes are polynomials of the shape: a constant plus the batch times monomials of the other sizes up
to degree two, or times areas that are counted in steps. The fit is linear least squares.

Levels follow it exactly. Peaks are the largest of several levels, so they have kinks that no
polynomial follows. Where a quantity's own leave-one-out error says that it does not follow the fit,
the most that it can be by the observations is taken (`kinks.py`).

Whether to trust all this, the peaks of observations tell: what would others have said of them?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mimose.costs import InputSize, Profile, StepObservation
from mimose.estimation.dimensions import Shape
from mimose.estimation.kinks import Kinks, Ladder, Scatter
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

_FAIR_ERROR = 0.02
"""The leave-one-out error of peaks, as a share of them, up to which predictions are trusted: how
much too low one is at most, and how much too high they are on average."""
_TO_DOUBT = 4
"""Observations it takes to doubt that the first dimension is the batch."""
_EXACT_ERROR = 0.001
"""The error, as a share of the peak, up to which a fit counts as exact."""
_VISIBLE_KINK = 0.0001
"""The leave-one-out error of a quantity, as a share of the peak, from which on it has kinks. Memory
follows polynomials to the allocator's rounding, and between the sizes seen a kink is several times
higher than what it leaves at them."""
_REACH = 0.02
"""How far beyond the largest size seen predictions go, as a share of it."""
_EXACT_REACH = 0.1
"""The same for a fit without a visible error."""
_MOST_UNCERTAIN = 0.25
"""How far off an extrapolated peak may be, as a share of it, to be worth telling."""
_PER_SIZE = 0.1
"""The least that it may be off at twice the largest size seen; in proportion elsewhere. Another
moment of the step may have become the highest: 9 % at twice the largest, of an encoder."""
_STEEPEST = 6
"""The power of a size with which memory grows at most. Attention over square images: the fourth."""


@dataclass(slots=True)
class Fit:
    """What observations of one pattern say of other sizes, and where to believe it."""

    regression: Regression
    seen: Seen
    kinked: Mask
    """Which quantities do not follow the regression."""
    kinks: Kinks
    errors: Floats
    """How much too high the peaks of observations, all kept and all recomputed, would have been
    predicted by the others, as a share of them."""
    margins: list[float | None]
    """By how much predictions are raised in each place (`Kinks.places`) so as not to be too low, as
    a share; None where they cannot be trusted."""
    times: Times
    fixed: tuple[bool, ...]
    movable: tuple[bool, ...]
    """Whether the input of each run can be moved, by the latest observation."""

    @property
    def shape(self) -> Shape:
        return self.regression.shape

    @property
    def error(self) -> float:
        """The largest leave-one-out error of the peaks, as a share of them."""
        return float(np.abs(self.errors).max(initial=0))

    @property
    def shortfall(self) -> float:
        """By how much a peak would have been predicted too low at most, as a share of it."""
        return float(np.maximum(-self.errors, 0).max(initial=0))

    @property
    def exact(self) -> bool:
        return self.error <= _EXACT_ERROR

    @property
    def fair(self) -> bool:
        """Whether predictions can be trusted in most places."""
        return 2 * self.margins.count(None) <= len(self.margins)

    # Fitting

    @classmethod
    def of(cls, observations: list[StepObservation]) -> Fit | None:
        """The fit of these with the shape that explains them best."""
        usual = Shape.of([o.size for o in observations])
        values = np.array([row_of(o.profile) for o in observations], float)
        if len(observations) < _TO_DOUBT:
            return cls._best_of([usual], observations, values)
        best, enough = None, False
        for shapes in usual.candidates():
            fit = cls._best_of(shapes, observations, values)
            enough |= fit is not None and fit.shape == usual
            if best is None or (fit is not None and fit.error < best.error):
                best = fit
            if best is not None and (best.exact or (enough and best.fair)):
                return best
        # While there are too few for the usual one, another has to explain them exactly: sizes that
        # lie near one line seem to be explained by much.
        return best if enough else None

    @classmethod
    def _best_of(
        cls, shapes: list[Shape], observations: list[StepObservation], values: Floats
    ) -> Fit | None:
        """The fit with that of the shapes which leaves the fewest bytes unexplained."""
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
        kinked[-1] = False  # no peak depends on the prelude: its best estimate is wanted
        kinks = _kinks(regression, values, signs, visible)
        predicted = np.where(kinked, kinks.left_out * signs, predicted)
        # The smallest and the largest do not count: a fit of the others would have to reach beyond
        # its range for them, as predictions never do.
        volume = values.sum(1)
        inner = sorted({*range(len(values))} - {int(volume.argmin()), int(volume.argmax())})
        errors = peaks(fixed, predicted[inner]) / real[inner] - 1
        extremes = dict(zip(inner, zip(errors.min(1), errors.max(1), strict=True), strict=True))
        places = [[extremes[i] for i in place if i in extremes] for place in kinks.places]
        return cls(
            regression=regression,
            seen=Seen.of(regression.shape, regression.points, values),
            kinked=kinked,
            kinks=kinks,
            errors=errors,
            margins=[_margin_of(place) for place in places],
            times=Times.of(observations),
            fixed=fixed,
            movable=tuple(run.input_movable for run in observations[-1].runs),
        )

    def take_times(self, observations: list[StepObservation]) -> None:
        """The times of the same observations are known now; their bytes are as they were."""
        self.times = Times.of(observations)

    # Predicting

    def predict(self, size: InputSize, *, upper_end: bool = False) -> Profile | None:
        """The profile at a size between those seen, or a little beyond; None further out.

        `upper_end` gives the most that observations give reason to expect, where they scatter.
        """
        point = self.shape.covering_point(size)
        reach = _EXACT_REACH if self.shortfall <= _EXACT_ERROR else _REACH
        if point is None or (beyond := self.seen.beyond(self.shape.extent(point))) > reach:
            return None
        row = self.regression.predict(point)
        row = self._upper_end(point, row) if upper_end else self._safe(point, row)
        if beyond > 0:
            row = row * (1 + beyond * 0.5)
            if len(point) == 1:  # a fit of sizes that lie close together may shoot up
                row = np.minimum(row, self.seen.values.max(0) * (1 + beyond) ** _STEEPEST)
        return self._profile(size, row)

    def _safe(self, point: Sequence[float], row: Floats) -> Floats:
        """The row that is not too low: of what is subtracted, not too high."""
        row, signs = self._within_neighbours(point, row), signs_of(len(self.fixed))
        if self.kinked.any():
            row = np.where(self.kinked, self.kinks.safe(point, row * signs) * signs, row)
        margin = self.margins[self.kinks.place(point)]
        return np.where(signs > 0, row * (1 + margin), row) if margin else row

    def _upper_end(self, point: Sequence[float], row: Floats) -> Floats:
        """The same if no quantity follows the regression."""
        signs = signs_of(len(self.fixed))
        scatter = Scatter.of(self.regression.left_out * signs, self.seen.values * signs)
        return scatter.safe(point, row * signs) * signs

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

    # Where to believe it

    def fair_at(self, size: InputSize) -> bool:
        """Whether predictions can be trusted at a size, as far as observations near it tell."""
        point = self.shape.covering_point(size)
        if point is None or not self.fair:
            return False
        return self.margins[self.kinks.place(point)] is not None

    def between(self, size: InputSize) -> bool:
        """Whether a size lies between those seen. Below them a quantity may have a kink that no
        observation has shown."""
        point = self.shape.covering_point(size)
        return point is not None and self.seen.between(self.shape.extent(point))

    def beyond(self, size: InputSize) -> float:
        """How far a size lies beyond the largest seen, as a share of it; inf if it has a dimension
        that never varied."""
        point = self.shape.covering_point(size)
        return math.inf if point is None else self.seen.beyond(self.shape.extent(point))

    def covers(self, size: InputSize) -> bool:
        return self.beyond(size) == 0

    def inside(self, size: InputSize) -> bool:
        """Whether a size is of just this shape and between the smallest and the largest seen."""
        return self.shape.describes(size) and self.between(size)

    # Questions

    def extrapolate(self, size: InputSize) -> tuple[Profile, float] | None:
        """The profile at a size beyond those seen, and how far off its peaks may be, as a share.

        For questions, not for plans: memory is taken to go on growing as it did between the sizes
        seen. None where the answer would be a guess.
        """
        point = self.shape.covering_point(size)
        if point is None or not self.fair:
            return None
        row = self._within_neighbours(point, self.regression.predict(point))
        uncertainty = max(self._uncertainty(point, row), _PER_SIZE * self.beyond(size))
        if uncertainty > _MOST_UNCERTAIN:
            return None
        return self._profile(size, row), uncertainty

    def _uncertainty(self, point: Sequence[float], row: Floats) -> float:
        """Three standard errors of the peaks, all kept and all recomputed, as a share of them."""
        features = [self.shape.features(each) for each in (*self.regression.points, point)]
        used = np.array(features)[:, self.shape.choices(len(features[0]))[0]]
        seen, asked = used[:-1], used[-1]
        real, inverse = peaks(self.fixed, self.seen.values), np.linalg.pinv(seen)
        residual = real - seen @ (inverse @ real)
        spread = np.sqrt((residual**2).sum(0) / max(1, len(seen) - seen.shape[1]))
        leverage = 1 + ((asked @ inverse) ** 2).sum()
        return float((3 * spread * np.sqrt(leverage) / peaks(self.fixed, row[None])[0]).max())


def _kinks(regression: Regression, values: Floats, signs: Floats, visible: Floats) -> Kinks:
    """What neighbours say, if one dimension varies; else what all observations say."""
    predicted, values = regression.left_out * signs, values * signs
    if len(regression.points[0]) == 1:
        return Ladder.of([x for (x,) in regression.points], predicted, values, visible)
    return Scatter.of(predicted, values)


def _margin_of(errors: list[tuple[float, float]]) -> float | None:
    """By how much to raise predictions whose peaks are off by between the two of each pair; None
    if they would be too high then."""
    if not errors:
        return 0.0
    shortfall = -min(0.0, *(low for low, _ in errors))
    excess = sum(max(0.0, high) for _, high in errors) / len(errors)
    if shortfall + excess > _FAIR_ERROR:
        return None
    return shortfall if shortfall > _VISIBLE_KINK else 0.0
