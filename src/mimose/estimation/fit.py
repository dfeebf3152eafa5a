"""One fit for all runs and all quantities at once: observations in, a profile at any size out.

Bytes are polynomials of the shape: a constant plus the batch times monomials of the other sizes up
to degree two. The fit is one linear least-squares problem.

Levels follow such polynomials exactly. Peaks are the largest of several of them, so they have kinks
that no polynomial follows; but they stay convex, and for a convex function the chord between two
observed sizes is never too low. So where a quantity's own leave-one-out error says that it has
kinks, the larger of fit and chord is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mimose.costs import InputSize, Profile, StepObservation
from mimose.estimation.dimensions import Shape
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
"""The leave-one-out error of the peak, as a share of it, at which predictions are trusted."""
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
    """Polynomials through all observations of one pattern, and where to believe them."""

    shape: Shape
    points: list[list[int]]
    """The varying dimensions of each observation."""
    values: Floats
    """One row an observation, one column a quantity of a run; those of the step come last."""
    coefficients: Floats
    kinked: Mask
    error: float
    times: Times
    fixed: tuple[bool, ...]
    movable: tuple[bool, ...]
    """Whether the input of each run can be moved, by the latest observation."""
    _any_kinked: bool = field(init=False)
    _low: list[int] = field(init=False)
    _high: list[int] = field(init=False)
    _grows: Mask = field(init=False)
    """Which quantities were never less at a larger size."""
    _capped: Mask = field(init=False)
    """Which quantities are never more than at a larger size."""
    _subtracted: Mask = field(init=False)
    _floor: Floats = field(init=False)
    """The least that each quantity can be."""
    _ladder: _Ladder | None = field(init=False)

    def __post_init__(self) -> None:
        columns = list(zip(*self.points, strict=True))
        self._low, self._high = [min(c) for c in columns], [max(c) for c in columns]
        self._any_kinked = bool(self.kinked.any())
        self._grows = self._rising()
        self._capped = ~self.kinked & self._grows
        runs = len(self.fixed)
        self._subtracted = signs_of(runs) < 0
        self._floor = np.where(signed(runs), -np.inf, 0.0)
        one = len(columns) == 1
        bounds = self._grows | ~signed(runs), self._capped
        self._ladder = _Ladder.of(columns[0], self.values, *bounds) if one else None

    @property
    def fair(self) -> bool:
        return self.error <= _FAIR_ERROR

    @classmethod
    def of(cls, observations: list[StepObservation]) -> Fit | None:
        """The fit of these, with the dimension for the batch that explains them best."""
        usual, *others = Shape.of([o.size for o in observations]).alternatives()
        best = cls.with_shape(usual, observations)
        if len(observations) < _TO_DOUBT or (best is not None and best.fair):
            return best
        # While there are too few for the usual one, another has to explain them exactly: sizes that
        # lie near one line seem to be explained by much.
        least = _EXACT_ERROR if best is None else best.error
        for shape in others:
            fit = cls.with_shape(shape, observations)
            if fit is not None and fit.error < least:
                best, least = fit, fit.error
        return best

    @classmethod
    def with_shape(cls, shape: Shape, observations: list[StepObservation]) -> Fit | None:
        points = [shape.point(o.size) for o in observations]
        features = np.array([shape.features(point) for point in points])
        if len(observations) <= features.shape[1]:
            return None
        values = np.array([row_of(o.profile) for o in observations], float)
        coefficients, _, rank, _ = np.linalg.lstsq(features, values, rcond=None)
        if rank < features.shape[1]:
            return None
        left_out = _leave_one_out(features, values, coefficients)
        fixed = tuple(run.fixed for run in observations[-1].runs)
        real = peaks(fixed, values)
        # The smallest and the largest do not count: a fit of the others would have to reach beyond
        # its range for them, as predictions never do.
        volume = values.sum(1)
        inner = sorted({*range(len(values))} - {int(volume.argmin()), int(volume.argmax())})
        wrong = np.abs(peaks(fixed, left_out[inner]) - real[inner]) / real[inner]
        kinked = np.max(np.abs(values - left_out) / real[:, :1], axis=0) > _VISIBLE_KINK
        kinked[-1] = False  # no peak depends on the prelude: its best estimate is wanted
        return cls(
            shape=shape,
            points=points,
            values=values,
            coefficients=coefficients,
            kinked=kinked,
            error=float(wrong.max(initial=0)),
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
        reach = _REACH if self.error > _EXACT_ERROR else _EXACT_REACH
        if point is None or (beyond := self._beyond(point)) > reach:
            return None
        row: Floats = np.dot(self.shape.features(point), self.coefficients)
        if upper_end:
            row = self._upper_end(row)
        else:
            row = self._mind_kinks(point, self._within_neighbours(point, row))
        if beyond > 0:
            row = row * (1 + beyond * 0.5)
            if len(point) == 1:  # a fit of sizes that lie close together may shoot up
                row = np.minimum(row, self.values.max(0) * (1 + beyond) ** _STEEPEST)
        return self._profile(size, row)

    def extrapolate(self, size: InputSize) -> tuple[Profile, float] | None:
        """The profile at a size beyond those seen, and how far off its peaks may be, as a share.

        For questions, not for plans: memory is taken to go on growing as it did between the sizes
        seen. None where the answer would be a guess.
        """
        point = self.shape.covering_point(size)
        if point is None or not self.fair:
            return None
        features = np.array(self.shape.features(point))
        row = self._within_neighbours(point, np.dot(features, self.coefficients))
        uncertainty = max(self._uncertainty(features, row), _PER_SIZE * self.beyond(size))
        if uncertainty > _MOST_UNCERTAIN:
            return None
        return self._profile(size, row), uncertainty

    def _uncertainty(self, features: Floats, row: Floats) -> float:
        """Three standard errors of the peaks, all kept and all recomputed, as a share of them."""
        seen = np.array([self.shape.features(point) for point in self.points])
        real = peaks(self.fixed, self.values)
        inverse = np.linalg.pinv(seen)
        residual = real - seen @ (inverse @ real)
        spread = np.sqrt((residual**2).sum(0) / max(1, len(seen) - seen.shape[1]))
        leverage = 1 + ((features @ inverse) ** 2).sum()
        return float((3 * spread * np.sqrt(leverage) / peaks(self.fixed, row[None])[0]).max())

    def covers(self, size: InputSize) -> bool:
        return self.beyond(size) == 0

    def between(self, size: InputSize) -> bool:
        """Whether a size lies between those seen. Below them a quantity may have a kink that no
        observation has shown."""
        point = self.shape.covering_point(size)
        return point is not None and _at_most(self._low, point) and not self._beyond(point)

    def beyond(self, size: InputSize) -> float:
        """How far a size lies beyond the largest seen, as a share of it; inf if it has a dimension
        that never varied."""
        point = self.shape.covering_point(size)
        return math.inf if point is None else self._beyond(point)

    def _beyond(self, point: Sequence[float]) -> float:
        shares = [(x - high) / max(high, 1) for x, high in zip(point, self._high, strict=True)]
        return max(0.0, *shares) if shares else 0.0

    def inside(self, size: InputSize) -> bool:
        """Whether a size is of just this shape and between the smallest and the largest seen."""
        if not self.shape.describes(size):
            return False
        point = self.shape.point(size)
        return _at_most(self._low, point) and _at_most(point, self._high)

    def _within_neighbours(self, point: Sequence[float], row: Floats) -> Floats:
        """No more than at any larger size seen, no less than at any smaller one: memory grows with
        size, and where sizes seen lie close together, a fit may bend far away from them."""
        if self._ladder is not None:
            return self._ladder.within(point[0], row)
        larger = [i for i, other in enumerate(self.points) if _at_most(point, other)]
        smaller = [i for i, other in enumerate(self.points) if _at_most(other, point)]
        if larger:
            row = np.where(self._capped, np.minimum(row, self.values[larger].min(0)), row)
        if not smaller:
            return row
        signed = np.isinf(self._floor)
        least = np.where(self._grows | ~signed, self.values[smaller].max(0), -np.inf)
        return np.maximum(row, least)

    def _rising(self) -> Mask:
        """Which quantities were never more at a smaller size.

        Others are: what is left after the blocks, above what was there before them.
        """
        points, rising = np.array(self.points), np.ones(self.values.shape[1], bool)
        for point, row in zip(points, self.values, strict=True):
            larger = (points >= point).all(1)
            rising &= row <= self.values[larger].min(0)
        return rising

    def _mind_kinks(self, point: Sequence[float], row: Floats) -> Floats:
        """What a kinked quantity is at most, as far as observations tell."""
        if not self._any_kinked:
            return row
        ladder = self._ladder
        if ladder is not None and point[0] <= ladder.at[0]:
            least = most = ladder.values[0]
        elif ladder is not None and (neighbours := ladder.neighbours(point[0])) is not None:
            chord, least = neighbours
            most = np.maximum(row, chord)
        else:
            return np.where(self.kinked, self._upper_end(row), row)
        safe = np.where(self._subtracted, np.minimum(row, least), most)
        return np.where(self.kinked, safe, row)

    def _upper_end(self, row: Floats) -> Floats:
        """The most that observations give reason to expect, where they scatter about the fit; of
        what is subtracted, the least."""
        features = np.array([self.shape.features(point) for point in self.points])
        fitted: Floats = features @ self.coefficients
        above, below = np.maximum(self.values - fitted, 0), np.maximum(fitted - self.values, 0)
        share = (above / np.maximum(fitted, 1)).max(0)
        upper = row + np.minimum(np.abs(row) * share, above.max(0))
        safe: Floats = np.where(self._subtracted, row - below.max(0), upper)
        return safe

    def _profile(self, size: InputSize, row: Floats) -> Profile:
        numbers: list[int] = np.maximum(row, self._floor).round().astype(np.int64).tolist()
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


@dataclass(frozen=True, slots=True)
class _Ladder:
    """Sizes seen that differ in one dimension, the smallest first, and what they say of others."""

    at: list[int]
    values: Floats
    floor: Floats
    """The most that was seen up to each size."""
    ceiling: Floats
    """The least that was seen from each size on; infinite for quantities that have no cap."""

    @classmethod
    def of(
        cls,
        at: Sequence[int],
        values: Floats,
        floored: Mask,
        capped: Mask,
    ) -> _Ladder:
        order = sorted(range(len(at)), key=at.__getitem__)
        values = values[order]
        ceiling = np.minimum.accumulate(values[::-1], axis=0)[::-1].copy()
        ceiling[:, ~capped] = np.inf
        floor = np.maximum.accumulate(values, axis=0)
        floor[:, ~floored] = -np.inf
        return cls([at[i] for i in order], values, floor, ceiling)

    def within(self, x: float, row: Floats) -> Floats:
        """The row, no lower than at any smaller size, no higher than at any larger one."""
        larger, smaller = bisect_left(self.at, x), bisect_right(self.at, x) - 1
        if larger < len(self.at):
            row = np.minimum(row, self.ceiling[larger])
        return np.maximum(row, self.floor[smaller]) if smaller >= 0 else row

    def neighbours(self, x: float) -> tuple[Floats, Floats] | None:
        """What lies on the line between the next smaller and the next larger size, and the least at
        both, if both are."""
        right = bisect_left(self.at, x)
        if not 0 < right < len(self.at):
            return None
        share = (x - self.at[right - 1]) / (self.at[right] - self.at[right - 1])
        low, high = self.values[right - 1], self.values[right]
        return low + share * (high - low), np.minimum(low, high)


def _at_most(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))


def _leave_one_out(features: Floats, values: Floats, coefficients: Floats) -> Floats:
    """What each observation would be predicted as by a fit of all the others."""
    projection = features @ np.linalg.pinv(features)
    leverage = np.clip(np.diag(projection), 0, 1 - 1e-6)
    residual: Floats = (values - features @ coefficients) / (1 - leverage)[:, None]
    return values - residual
