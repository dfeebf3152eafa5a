"""Upper bounds of quantities that do not follow the fit.

All values here have the sign with which they enter peaks: a subtracted quantity is negative, so the
higher value is always the safe one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mimose.estimation.regression import largest_of_others
from mimose.estimation.rows import Floats


class Kinks(Protocol):
    """Upper bounds by the observations of quantities that do not follow the fit."""

    @property
    def left_out(self) -> Floats:
        """The upper bound at each observation by all other observations (rows: observations)."""

    @property
    def intervals(self) -> list[list[int]]:
        """For each interval of sizes, the observations that show how good predictions are there."""

    def interval(self, point: Sequence[float]) -> int:
        """The index of the interval that a size is in."""

    def upper_bound(self, point: Sequence[float], row: Floats) -> Floats:
        """The upper bound of each quantity at a size for which the fit predicts `row`."""


@dataclass(frozen=True, slots=True)
class ResidualBound:
    """For any number of varying dimensions: the largest error at any size may occur at every size.

    The bound is the prediction plus the largest absolute or the largest relative error, whichever
    is smaller. There is one interval.
    """

    predicted: Floats
    """The leave-one-out prediction of each observation."""
    above: Floats
    """How far the observation is above it."""
    shares: Floats
    """The same as a fraction of the prediction."""

    @classmethod
    def of(cls, predicted: Floats, values: Floats) -> ResidualBound:
        above = np.maximum(values - predicted, 0)
        return cls(predicted, above, above / np.maximum(np.abs(predicted), 1))

    @property
    def left_out(self) -> Floats:
        shares, above = largest_of_others(self.shares), largest_of_others(self.above)
        return self.predicted + np.minimum(np.abs(self.predicted) * shares, above)

    @property
    def intervals(self) -> list[list[int]]:
        return [list(range(len(self.predicted)))]

    def interval(self, point: Sequence[float]) -> int:
        return 0

    def upper_bound(self, point: Sequence[float], row: Floats) -> Floats:
        most: Floats = np.minimum(np.abs(row) * self.shares.max(0), self.above.max(0))
        return row + most


@dataclass(frozen=True, slots=True)
class NeighbourBound:
    """For one varying dimension: bounds by the next smaller and the next larger observed sizes.

    A peak is the maximum of several polynomials; the memory of a loss computed in chunks is the
    minimum of two. Both have a kink where one polynomial takes over from the other. Between two
    sizes, a quantity with one kink is bounded by the chord if it bends upwards there. If it bends
    downwards, it is bounded by the two lines that continue from the neighbours on either side.

    A quantity that grows in jumps may exceed this bound, up to the higher of its values at the two
    sizes. `jumps` is the fraction of that distance to allow. It is measured at both sizes: how far
    each of them exceeds the bound by its own neighbours.
    """

    sizes: Floats
    """The sizes, the smallest first."""
    values: Floats
    """One row for each size, one column for each quantity."""
    order: list[int]
    """The index of the observation of each size."""
    left_out: Floats
    jumps: Floats
    """One row for each interval between two sizes, one column for each quantity."""

    @classmethod
    def of(
        cls, sizes: Sequence[float], predicted: Floats, values: Floats, visible: Floats
    ) -> NeighbourBound:
        """The bounds by these observations; `predicted` are their leave-one-out predictions.

        Differences of less than `visible` bytes (one number for each observation) do not count.
        """
        order = np.argsort(sizes)
        at, ordered, left_out = np.array(sizes, float)[order], values[order], predicted.copy()
        inner = np.arange(1, len(at) - 1)
        smooth, higher = _between(at, ordered, at[inner], inner - 1, inner + 1)
        above = ordered[inner] - smooth
        shares = np.clip(above / np.maximum(higher - smooth, 1), 0, 1)
        shares[above < visible[order[inner], None]] = 0
        shares = np.pad(shares, ((1, 1), (0, 0)))  # both ends have one neighbour only
        bound = smooth + np.maximum(shares[:-2], shares[2:]) * (higher - smooth)
        # The neighbours of a left-out size are twice as far apart as those of a size next to it.
        left_out[order[inner]] = np.minimum(bound, (bound + ordered[inner]) / 2)
        jumps = np.maximum(shares[:-1], shares[1:])
        return cls(at, ordered, order.tolist(), left_out, jumps)

    @property
    def intervals(self) -> list[list[int]]:
        return [list(pair) for pair in pairwise(self.order)]

    def interval(self, point: Sequence[float]) -> int:
        return min(max(bisect_left(self.sizes, point[0]), 1), len(self.sizes) - 1) - 1

    def upper_bound(self, point: Sequence[float], row: Floats) -> Floats:
        (x,) = point
        first, last, k = self.values[0], self.values[-1], self.interval(point)
        bound: Floats
        if x <= self.sizes[0]:
            bound = np.where(first <= last, first, np.maximum(row, first))
        elif x > self.sizes[-1]:
            line = _line(self.sizes, self.values, x, k, k + 1)
            bound = np.maximum(np.maximum(row, last), line)
        else:
            smooth, higher = _between(self.sizes, self.values, x, k, k + 1)
            bound = smooth + self.jumps[k] * (higher - smooth)
        return bound


_Indices = int | npt.NDArray[np.intp]


def _between(
    at: Floats, values: Floats, x: float | Floats, left: _Indices, right: _Indices
) -> tuple[Floats, Floats]:
    """The bound of smooth quantities at x between two sizes, and the higher of both values.

    `x`, `left` and `right` are one number each, or arrays of the same length.
    """
    last = len(at) - 1
    chord = _line(at, values, x, left, right)
    from_left = _line(at, values, x, np.maximum(left - 1, 0), left)
    from_right = _line(at, values, x, right, np.minimum(right + 1, last))
    higher = np.maximum(values[left], values[right])
    bend = np.minimum(
        np.where(_column(left == 0), higher, from_left),
        np.where(_column(right == last), higher, from_right),
    )
    return np.maximum(chord, np.minimum(bend, higher)), higher


def _line(at: Floats, values: Floats, x: float | Floats, i: _Indices, j: _Indices) -> Floats:
    """The line through the values at sizes i and j, evaluated at x; constant if i = j."""
    width = at[j] - at[i]
    share = (x - at[i]) / (width + (width == 0))
    line: Floats = values[i] + _column(share) * (values[j] - values[i])
    return line


def _column(numbers: npt.ArrayLike) -> npt.NDArray[Any]:
    """Numbers with a trailing axis, to broadcast over the columns of rows."""
    return np.asarray(numbers)[..., None]
