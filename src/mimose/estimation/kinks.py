"""Quantities that follow no fit: what they are at most.

The higher value of each quantity is the safe one here: what peaks subtract comes as a negative.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mimose.estimation.regression import largest_of_others
from mimose.estimation.rows import Floats


class Kinks(Protocol):
    """What observations say of quantities that follow no fit."""

    def safe(self, point: Sequence[float], row: Floats) -> Floats:
        """What each quantity is at most at a size for which the fit says `row`."""

    def left_out(self) -> Floats:
        """The same of each observation, by all others."""

    def places(self) -> list[list[int]]:
        """Which observations tell how well sizes in each place are told."""

    def place(self, point: Sequence[float]) -> int:
        """The place of a size."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Of observations of any sizes: what the fit missed at one, it may miss elsewhere."""

    told: Floats
    """What fits of the others say of each observation."""
    above: Floats
    """How far it was above that."""
    shares: Floats
    """The same as a share."""

    @classmethod
    def of(cls, told: Floats, values: Floats) -> Scatter:
        above = np.maximum(values - told, 0)
        return cls(told, above, above / np.maximum(np.abs(told), 1))

    def safe(self, point: Sequence[float], row: Floats) -> Floats:
        safe: Floats = row + np.minimum(np.abs(row) * self.shares.max(0), self.above.max(0))
        return safe

    def left_out(self) -> Floats:
        shares, above = largest_of_others(self.shares), largest_of_others(self.above)
        return self.told + np.minimum(np.abs(self.told) * shares, above)

    def places(self) -> list[list[int]]:
        return [list(range(len(self.told)))]

    def place(self, point: Sequence[float]) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Ladder:
    """Of observations that differ in one dimension: what their neighbours say.

    A peak is the largest of several polynomials; what a loss in chunks takes is the smaller of two.
    Both have a kink where one takes over from the other. Between two sizes seen, a quantity with
    one kink is no higher than the chord if it bends upwards there. If it bends downwards, it is no
    higher than the lines that go on from the two sizes on each side.

    What grows in jumps may be higher than that, though not higher than at both sizes. How far it
    went from the one to the other at the sizes seen is expected of others, too.
    """

    at: Floats
    """The smallest first."""
    values: Floats
    order: list[int]
    left_out_: Floats
    jumps: Floats
    """How far each quantity went from the one to the other at most, as a share."""

    @classmethod
    def of(cls, sizes: Sequence[float], told: Floats, values: Floats, visible: Floats) -> Ladder:
        """Of sizes, what fits of the others say of them, what they were, and from how many bytes on
        a difference counts at each."""
        order = np.argsort(sizes)
        at, values, told = np.array(sizes, float)[order], values[order], told.copy()
        inner = np.arange(1, len(at) - 1)
        between, higher = _between(at, values, at[inner], inner - 1, inner + 1)
        above = values[inner] - between
        jumps = np.clip(above / np.maximum(higher - between, 1), 0, 1)
        jumps[above < visible[order[inner], None]] = 0
        safe = between + largest_of_others(jumps) * (higher - between)
        # Its neighbours are twice as far apart as a size between them would find.
        told[order[inner]] = np.minimum(safe, (safe + values[inner]) / 2)
        return cls(at, values, order.tolist(), told, jumps.max(0, initial=0))

    def safe(self, point: Sequence[float], row: Floats) -> Floats:
        (x,) = point
        right = bisect_left(self.at, x)
        if right == 0:
            rising = self.values[0] <= self.values[-1]
            least: Floats = np.where(rising, self.values[0], np.maximum(row, self.values[0]))
            return least
        if right == len(self.at):
            ends = np.array([right - 2]), np.array([right - 1])
            line = _line(self.at, self.values, np.array([x]), *ends)[0]
            most: Floats = np.maximum(np.maximum(row, line), self.values[-1])
            return most
        beside = np.array([right - 1]), np.array([right])
        between, higher = _between(self.at, self.values, np.array([x]), *beside)
        safe: Floats = (between + self.jumps * (higher - between))[0]
        return safe

    def left_out(self) -> Floats:
        return self.left_out_

    def places(self) -> list[list[int]]:
        return [list(pair) for pair in pairwise(self.order)]

    def place(self, point: Sequence[float]) -> int:
        return min(max(bisect_left(self.at, point[0]), 1), len(self.at) - 1) - 1


_Indices = npt.NDArray[np.intp]


def _between(
    at: Floats, values: Floats, x: Floats, left: _Indices, right: _Indices
) -> tuple[Floats, Floats]:
    """What quantities are at most at each x between two sizes, unless they jump; and the higher
    value of both sizes."""
    last = len(at) - 1
    chord = _line(at, values, x, left, right)
    before = _line(at, values, x, np.maximum(left - 1, 0), left)
    after = _line(at, values, x, right, np.minimum(right + 1, last))
    before[left == 0] = after[right == last] = np.inf
    higher = np.maximum(values[left], values[right])
    return np.maximum(chord, np.minimum(np.minimum(before, after), higher)), higher


def _line(at: Floats, values: Floats, x: Floats, i: _Indices, j: _Indices) -> Floats:
    """The lines through two sizes each, at each x; of one and the same size, its values."""
    share = (x - at[i]) / np.where(i == j, 1, at[j] - at[i])
    line: Floats = values[i] + share[:, None] * (values[j] - values[i])
    return line
