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
from dataclasses import dataclass, field

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
    values: Floats
    """One row an observation, one column a quantity of a run; those of the step come last."""
    kinked: Mask
    """Which quantities do not follow the fit."""
    kinks: Kinks
    errors: Floats
    """How much too high the peaks of observations, all kept and all recomputed, would be told by
    all others, as a share of them."""
    margins: list[float | None]
    """By how much predictions are raised in each place, as a share, since the others would have
    told the peaks of some observation too low; None where they cannot be trusted."""
    times: Times
    fixed: tuple[bool, ...]
    movable: tuple[bool, ...]
    """Whether the input of each run can be moved, by the latest observation."""
    _points: Floats = field(init=False)
    _low: list[float] = field(init=False)
    _high: list[float] = field(init=False)
    _grows: Mask = field(init=False)
    """Which quantities were never less at a larger size."""

    def __post_init__(self) -> None:
        self._points = np.array(self.regression.points, float)
        columns = list(zip(*map(self.shape.extent, self.regression.points), strict=True))
        self._low, self._high = [min(c) for c in columns], [max(c) for c in columns]
        self._grows = self._rising()

    @property
    def shape(self) -> Shape:
        return self.regression.shape

    @property
    def error(self) -> float:
        """The largest leave-one-out error of the peaks, as a share of them."""
        return float(np.abs(self.errors).max(initial=0))

    @property
    def exact(self) -> bool:
        return self.error <= _EXACT_ERROR

    @property
    def fair(self) -> bool:
        """Whether predictions can be trusted in most places."""
        return 2 * self.margins.count(None) <= len(self.margins)

    def fair_at(self, size: InputSize) -> bool:
        """Whether predictions can be trusted at a size."""
        point = self.shape.covering_point(size)
        return self.fair and point is not None and self._margin(point) is not None

    def _margin(self, point: Sequence[float]) -> float | None:
        return self.margins[self.kinks.place(point)]

    @classmethod
    def of(cls, observations: list[StepObservation]) -> Fit | None:
        """The fit of these with the shape that explains them best."""
        usual = Shape.of([o.size for o in observations])
        values = np.array([row_of(o.profile) for o in observations], float)
        if len(observations) < _TO_DOUBT:
            return cls._best_of([usual], observations, values)
        best, enough = None, False
        for shapes in filter(None, usual.candidates()):
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
        points = [shapes[0].point(o.size) for o in observations]
        found = (Regression.of(shape, points, values) for shape in shapes)
        best = min(filter(None, found), key=lambda r: r.unexplained, default=None)
        return None if best is None else cls._with(best, observations, values)

    @classmethod
    def _with(
        cls, regression: Regression, observations: list[StepObservation], values: Floats
    ) -> Fit:
        fixed = tuple(run.fixed for run in observations[-1].runs)
        real, told, signs = peaks(fixed, values), regression.left_out, signs_of(len(fixed))
        visible = _VISIBLE_KINK * real[:, 0]
        kinked: Mask = np.any(np.abs(values - told) > visible[:, None], axis=0)
        kinked[-1] = False  # no peak depends on the prelude: its best estimate is wanted
        kinks: Kinks
        if len(regression.points[0]) == 1:
            at = [x for (x,) in regression.points]
            kinks = Ladder.of(at, told * signs, values * signs, visible)
        else:
            kinks = Scatter.of(told * signs, values * signs)
        told = np.where(kinked, kinks.left_out() * signs, told)
        # The smallest and the largest do not count: a fit of the others would have to reach beyond
        # its range for them, as predictions never do.
        volume = values.sum(1)
        inner = sorted({*range(len(values))} - {int(volume.argmin()), int(volume.argmax())})
        errors = peaks(fixed, told[inner]) / real[inner] - 1
        of = {observation: k for k, observation in enumerate(inner)}
        places = [[of[i] for i in place if i in of] for place in kinks.places()]
        return cls(
            regression=regression,
            values=values,
            kinked=kinked,
            kinks=kinks,
            errors=errors,
            margins=[_margin_of(errors[place]) for place in places],
            times=Times.of(observations),
            fixed=fixed,
            movable=tuple(run.input_movable for run in observations[-1].runs),
        )

    def take_times(self, observations: list[StepObservation]) -> None:
        """The times of the same observations are known now; their bytes are as they were."""
        self.times = Times.of(observations)

    def predict(self, size: InputSize, *, upper_end: bool = False) -> Profile | None:
        """The profile at a size between those seen, or a little beyond; None further out.

        `upper_end` gives the most that observations give reason to expect, where they scatter.
        """
        point = self.shape.covering_point(size)
        reach = _EXACT_REACH if -self.errors.min(initial=0) <= _EXACT_ERROR else _REACH
        if point is None or (beyond := self._beyond(point)) > reach:
            return None
        row = self.regression.predict(point)
        if upper_end:
            signs = signs_of(len(self.fixed))
            row = self._safe(
                Scatter.of(self.regression.left_out * signs, self.values * signs), point, row
            )
        else:
            row = self._within_neighbours(point, row)
            row = np.where(self.kinked, self._safe(self.kinks, point, row), row)
            row = row * (1 + (self._margin(point) or 0.0))
        if beyond > 0:
            row = row * (1 + beyond * 0.5)
            if len(point) == 1:  # a fit of sizes that lie close together may shoot up
                row = np.minimum(row, self.values.max(0) * (1 + beyond) ** _STEEPEST)
        return self._profile(size, row)

    def _safe(self, kinks: Kinks, point: Sequence[float], row: Floats) -> Floats:
        """The most that each quantity can be; the least, if it is subtracted."""
        signs = signs_of(len(self.fixed))
        return kinks.safe(point, row * signs) * signs

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
        real, inverse = peaks(self.fixed, self.values), np.linalg.pinv(seen)
        residual = real - seen @ (inverse @ real)
        spread = np.sqrt((residual**2).sum(0) / max(1, len(seen) - seen.shape[1]))
        leverage = 1 + ((asked @ inverse) ** 2).sum()
        return float((3 * spread * np.sqrt(leverage) / peaks(self.fixed, row[None])[0]).max())

    def covers(self, size: InputSize) -> bool:
        return self.beyond(size) == 0

    def between(self, size: InputSize) -> bool:
        """Whether a size lies between those seen. Below them a quantity may have a kink that no
        observation has shown."""
        point = self.shape.covering_point(size)
        if point is None or self._beyond(point):
            return False
        return _at_most(self._low, self.shape.extent(point))

    def beyond(self, size: InputSize) -> float:
        """How far a size lies beyond the largest seen, as a share of it; inf if it has a dimension
        that never varied."""
        point = self.shape.covering_point(size)
        return math.inf if point is None else self._beyond(point)

    def _beyond(self, point: Sequence[float]) -> float:
        extents = zip(self.shape.extent(point), self._high, strict=True)
        return max([0.0, *((x - high) / max(high, 1) for x, high in extents)])

    def inside(self, size: InputSize) -> bool:
        """Whether a size is of just this shape and between the smallest and the largest seen."""
        if not self.shape.describes(size):
            return False
        extent = self.shape.extent(self.shape.point(size))
        return _at_most(self._low, extent) and _at_most(extent, self._high)

    def _within_neighbours(self, point: Sequence[float], row: Floats) -> Floats:
        """No more than at any larger size seen, no less than at any smaller one: memory grows with
        size, and where sizes seen lie close together, a fit may bend far away from them."""
        larger, smaller = (self._points >= point).all(1), (self._points <= point).all(1)
        if larger.any():
            capped = ~self.kinked & self._grows
            row = np.where(capped, np.minimum(row, self.values[larger].min(0)), row)
        if smaller.any():
            floored = self._grows | ~signed(len(self.fixed))
            row = np.where(floored, np.maximum(row, self.values[smaller].max(0)), row)
        return row

    def _rising(self) -> Mask:
        """Which quantities were never more at a smaller size.

        Others are: what is left after the blocks, above what was there before them.
        """
        rising = np.ones(self.values.shape[1], bool)
        for point, row in zip(self._points, self.values, strict=True):
            larger = (self._points >= point).all(1)
            rising &= row <= self.values[larger].min(0)
        return rising

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


def _margin_of(errors: Floats) -> float | None:
    """The margin by which predictions are not too low, if they are hardly too high then."""
    if not len(errors):
        return 0.0
    shortfall, excess = float(-errors.min(initial=0)), np.maximum(errors, 0).mean(0).max()
    if shortfall + excess > _FAIR_ERROR:
        return None
    return shortfall if shortfall > _VISIBLE_KINK else 0.0


def _at_most(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))
