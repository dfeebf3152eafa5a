"""Upper bounds of quantities that do not follow the fit.

All values here have the sign with which they enter peaks: a subtracted quantity is negative, so the
higher value is always the safe one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mimose.estimation.regression import largest_of_others
from mimose.estimation.rows import Floats

_ON_LINE = 0.75
"""The share of the observations that must lie on a line for bounds by neighbours."""

Point = Sequence[float]
"""The value of each symbol."""


def kinks_of(
    points: Sequence[Point], predicted: Floats, values: Floats, visible: Floats
) -> list[Kinks]:
    """The bounds by these observations, the closest one first; at most sizes several hold.

    `predicted` are the leave-one-out predictions. Differences of less than `visible` bytes (one
    number for each observation) do not count.
    """
    line = Line.of(points)
    if line is None:
        return [ResidualBound.of(predicted, values)]
    neighbours = NeighbourBound.of(line, predicted, values, visible)
    return [neighbours, ResidualBound.of(predicted, values)] if line.others else [neighbours]


def _without(point: Point, symbol: int) -> Point:
    return (*point[:symbol], *point[symbol + 1 :])


@dataclass(frozen=True, slots=True)
class Line:
    """Observations that differ in one symbol only: all if one symbol varies, or most of them.

    Where batches are full but for the last one of an epoch, most observations differ in the length.
    """

    symbol: int
    others: Point
    """The values of all other symbols."""
    order: list[int]
    """The observations on the line, the smallest first."""
    sizes: Floats
    """The values of the symbol at these observations."""

    @classmethod
    def of(cls, points: Sequence[Point]) -> Line | None:
        """The line that most sizes are on; None if there is no such line."""
        for symbol in range(len(points[0])):
            others = [_without(point, symbol) for point in points]
            most, count = Counter(others).most_common(1)[0]
            if count >= max(3, _ON_LINE * len(points)):
                on = [i for i, each in enumerate(others) if each == most]
                on.sort(key=lambda i: points[i][symbol])
                return cls(symbol, most, on, np.array([points[i][symbol] for i in on], float))
        return None

    def interval(self, point: Point) -> int | None:
        """Between which two observations a size is; None if it is not on the line.

        Below the first observation, the next interval counts; above the last one only if no other
        symbol varies.
        """
        x, last = point[self.symbol], len(self.sizes) - 1
        if self.others and (_without(point, self.symbol) != self.others or x > self.sizes[last]):
            return None
        return min(max(bisect_left(self.sizes, x), 1), last) - 1


@dataclass(frozen=True, slots=True)
class ResidualBound:
    """For sizes anywhere: the largest error at any observed size may occur at every size.

    The bound is the prediction plus the largest absolute or the largest relative error, whichever
    is smaller. There is one interval.
    """

    predicted: Floats
    """The leave-one-out prediction of each observation."""
    above: Floats
    """How far the observation is above it."""
    shares: Floats
    """The same as a fraction of the prediction."""
    inner: list[int]
    """The observations whose left-out bounds count. For the smallest and the largest, the fit would
    have to reach beyond its range, which predictions never do."""

    @classmethod
    def of(cls, predicted: Floats, values: Floats) -> ResidualBound:
        above, total = np.maximum(values - predicted, 0), values.sum(1)
        inner = sorted({*range(len(values))} - {int(total.argmin()), int(total.argmax())})
        return cls(predicted, above, above / np.maximum(np.abs(predicted), 1), inner)

    @property
    def left_out(self) -> Floats:
        """The upper bound at each observation by all other observations (rows: observations)."""
        shares, above = largest_of_others(self.shares), largest_of_others(self.above)
        return self.predicted + np.minimum(np.abs(self.predicted) * shares, above)

    @property
    def intervals(self) -> list[list[int]]:
        """For each interval of sizes, the observations that show how good predictions are there."""
        return [list(range(len(self.predicted)))]

    def interval(self, point: Point) -> int:
        """The index of the interval that a size is in."""
        return 0

    def upper_bound(self, point: Point, row: Floats) -> Floats:
        """The upper bound of each quantity at a size for which the fit predicts `row`."""
        most: Floats = np.minimum(np.abs(row) * self.shares.max(0), self.above.max(0))
        return row + most


@dataclass(frozen=True, slots=True)
class NeighbourBound:
    """For sizes on a line: bounds by the next smaller and the next larger observed sizes on it.

    A peak is the maximum of several polynomials; the memory of a loss computed in chunks is the
    minimum of two. Both have a kink where one polynomial takes over from the other. Between two
    sizes, a quantity with one kink is bounded by the chord if it bends upwards there. If it bends
    downwards, it is bounded by the two lines that continue from the neighbours on either side.

    A quantity that grows in jumps may exceed this bound, up to the higher of its values at the two
    sizes. `jumps` is the fraction of that distance to allow. It is measured at both sizes: how far
    each of them exceeds the bound by its own neighbours.
    """

    line: Line
    values: Floats
    """One row for each size on the line, one column for each quantity."""
    left_out: Floats
    """The upper bound at each observation by all other observations."""
    jumps: Floats
    """One row for each interval between two sizes, one column for each quantity."""

    @classmethod
    def of(cls, line: Line, predicted: Floats, values: Floats, visible: Floats) -> NeighbourBound:
        at, order = line.sizes, np.array(line.order)
        ordered, left_out, inner = values[order], predicted.copy(), np.arange(1, len(at) - 1)
        smooth, higher = _between(at, ordered, at[inner], inner - 1, inner + 1)
        above = ordered[inner] - smooth
        shares = np.clip(above / np.maximum(higher - smooth, 1), 0, 1)
        shares[above < visible[order[inner], None]] = 0
        shares = np.pad(shares, ((1, 1), (0, 0)))  # both ends have one neighbour only
        bound = smooth + np.maximum(shares[:-2], shares[2:]) * (higher - smooth)
        if len(inner) > 1:  # else no line continues from the neighbours on either side
            # The neighbours of a left-out size are twice as far apart as those of a size near it.
            left_out[order[inner]] = np.minimum(bound, (bound + ordered[inner]) / 2)
        jumps = np.maximum(shares[:-1], shares[1:])
        return cls(line, ordered, left_out, jumps)

    @property
    def inner(self) -> list[int]:
        """The observations whose left-out bounds count: all but both ends."""
        return self.line.order[1:-1]

    @property
    def intervals(self) -> list[list[int]]:
        """The two observations at the ends of each interval."""
        return [list(pair) for pair in pairwise(self.line.order)]

    def interval(self, point: Point) -> int | None:
        """The index of the interval that a size is in; None if the bound does not hold there."""
        return self.line.interval(point)

    def upper_bound(self, point: Point, row: Floats) -> Floats:
        """The upper bound of each quantity at a size for which the fit predicts `row`."""
        sizes, x, k = self.line.sizes, point[self.line.symbol], self.line.interval(point)
        assert k is not None
        first, last = self.values[0], self.values[-1]
        bound: Floats
        if x <= sizes[0]:
            bound = np.where(first <= last, first, np.maximum(row, first))
        elif x > sizes[-1]:
            beyond = _chord(sizes, self.values, x, k, k + 1)
            bound = np.maximum(np.maximum(row, last), beyond)
        else:
            smooth, higher = _between(sizes, self.values, x, k, k + 1)
            bound = smooth + self.jumps[k] * (higher - smooth)
        return bound


Kinks = ResidualBound | NeighbourBound


_Indices = int | npt.NDArray[np.intp]


def _between(
    at: Floats, values: Floats, x: float | Floats, left: _Indices, right: _Indices
) -> tuple[Floats, Floats]:
    """The bound of smooth quantities at x between two sizes, and the higher of both values.

    `x`, `left` and `right` are one number each, or arrays of the same length.
    """
    last = len(at) - 1
    chord = _chord(at, values, x, left, right)
    from_left = _chord(at, values, x, np.maximum(left - 1, 0), left)
    from_right = _chord(at, values, x, right, np.minimum(right + 1, last))
    higher = np.maximum(values[left], values[right])
    bend = np.minimum(
        np.where(_column(left == 0), higher, from_left),
        np.where(_column(right == last), higher, from_right),
    )
    return np.maximum(chord, np.minimum(bend, higher)), higher


def _chord(at: Floats, values: Floats, x: float | Floats, i: _Indices, j: _Indices) -> Floats:
    """The line through the values at sizes i and j, evaluated at x; constant if i = j."""
    width = at[j] - at[i]
    share = (x - at[i]) / (width + (width == 0))
    line: Floats = values[i] + _column(share) * (values[j] - values[i])
    return line


def _column(numbers: npt.ArrayLike) -> npt.NDArray[Any]:
    """Numbers with a trailing axis, to broadcast over the columns of rows."""
    return np.asarray(numbers)[..., None]
