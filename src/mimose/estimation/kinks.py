"""Quantities that do not follow the fit: what they are at most.

The higher value of a quantity is the safe one here: what peaks subtract comes as a negative.
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
    """What observations say of quantities that do not follow the fit."""

    @property
    def left_out(self) -> Floats:
        """What each quantity of each observation is at most by all others."""

    @property
    def places(self) -> list[list[int]]:
        """The observations that tell how good predictions are, for each place between sizes."""

    def place(self, point: Sequence[float]) -> int:
        """The place of a size."""

    def safe(self, point: Sequence[float], row: Floats) -> Floats:
        """What each quantity is at most at a size for which the fit says `row`."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """For any sizes: what the fit missed at one, it may miss at all others."""

    predicted: Floats
    """What fits of the others say of each observation."""
    above: Floats
    """How far it was above that."""
    shares: Floats
    """The same as a share."""

    @classmethod
    def of(cls, predicted: Floats, values: Floats) -> Scatter:
        above = np.maximum(values - predicted, 0)
        return cls(predicted, above, above / np.maximum(np.abs(predicted), 1))

    @property
    def left_out(self) -> Floats:
        shares, above = largest_of_others(self.shares), largest_of_others(self.above)
        return self.predicted + np.minimum(np.abs(self.predicted) * shares, above)

    @property
    def places(self) -> list[list[int]]:
        return [list(range(len(self.predicted)))]

    def place(self, point: Sequence[float]) -> int:
        return 0

    def safe(self, point: Sequence[float], row: Floats) -> Floats:
        most: Floats = np.minimum(np.abs(row) * self.shares.max(0), self.above.max(0))
        return row + most


@dataclass(frozen=True, slots=True)
class Ladder:
    """For sizes that differ in one dimension: what the next smaller and the next larger ones say.

    A peak is the largest of several polynomials; what a loss in chunks takes is the smaller of two.
    Both have a kink where one takes over from the other. Between two sizes, a quantity with one
    kink is no higher than the chord if it bends upwards there. If it bends downwards, it is no
    higher than the lines that go on from the two sizes on each side.

    What grows in jumps may be higher than that, though not higher than at both sizes. The share of
    this way that it went at the one or the other, by their own neighbours, it may go in between.
    """

    at: Floats
    """The sizes, the smallest first."""
    values: Floats
    order: list[int]
    """The observation of each size."""
    left_out: Floats
    jumps: Floats
    """The share of this way that each quantity may go in each place."""

    @classmethod
    def of(cls, at: Sequence[float], predicted: Floats, values: Floats, visible: Floats) -> Ladder:
        """The ladder of observations, of which fits of the others say what is `predicted`.

        Differences of less than `visible` bytes at each do not count.
        """
        order = np.argsort(at)
        sizes, ordered, left_out = np.array(at, float)[order], values[order], predicted.copy()
        inner = np.arange(1, len(at) - 1)
        between, higher = _between(sizes, ordered, sizes[inner], inner - 1, inner + 1)
        above = ordered[inner] - between
        shares = np.clip(above / np.maximum(higher - between, 1), 0, 1)
        shares[above < visible[order[inner], None]] = 0
        shares = np.pad(shares, ((1, 1), (0, 0)))  # of the smallest and the largest nothing tells
        safe = between + np.maximum(shares[:-2], shares[2:]) * (higher - between)
        # Its neighbours are twice as far apart as those of a size beside it.
        left_out[order[inner]] = np.minimum(safe, (safe + ordered[inner]) / 2)
        jumps = np.maximum(shares[:-1], shares[1:])
        return cls(sizes, ordered, order.tolist(), left_out, jumps)

    @property
    def places(self) -> list[list[int]]:
        return [list(pair) for pair in pairwise(self.order)]

    def place(self, point: Sequence[float]) -> int:
        return min(max(bisect_left(self.at, point[0]), 1), len(self.at) - 1) - 1

    def safe(self, point: Sequence[float], row: Floats) -> Floats:
        (x,) = point
        first, last, beside = self.values[0], self.values[-1], self.place(point)
        safe: Floats
        if x <= self.at[0]:
            safe = np.where(first <= last, first, np.maximum(row, first))
        elif x > self.at[-1]:
            line = _line(self.at, self.values, x, beside, beside + 1)
            safe = np.maximum(np.maximum(row, last), line)
        else:
            between, higher = _between(self.at, self.values, x, beside, beside + 1)
            safe = between + self.jumps[beside] * (higher - between)
        return safe


_Indices = int | npt.NDArray[np.intp]


def _between(
    at: Floats, values: Floats, x: float | Floats, left: _Indices, right: _Indices
) -> tuple[Floats, Floats]:
    """What quantities are at most at x between two sizes, unless they jump; and the higher of their
    values at both sizes. For one x, or for many at once."""
    last = len(at) - 1
    chord = _line(at, values, x, left, right)
    before = _line(at, values, x, np.maximum(left - 1, 0), left)
    after = _line(at, values, x, right, np.minimum(right + 1, last))
    higher = np.maximum(values[left], values[right])
    bend = np.minimum(
        np.where(_column(left == 0), higher, before),
        np.where(_column(right == last), higher, after),
    )
    return np.maximum(chord, np.minimum(bend, higher)), higher


def _line(at: Floats, values: Floats, x: float | Floats, i: _Indices, j: _Indices) -> Floats:
    """The line through two sizes, at x; level through one and the same."""
    width = at[j] - at[i]
    share = (x - at[i]) / (width + (width == 0))
    line: Floats = values[i] + _column(share) * (values[j] - values[i])
    return line


def _column(numbers: npt.ArrayLike) -> npt.NDArray[Any]:
    """Numbers by which to multiply rows, or by which to choose between them."""
    return np.asarray(numbers)[..., None]
