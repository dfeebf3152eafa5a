"""The range of observed sizes, and the bounds that observations give for other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mimose.estimation.dimensions import Shape
from mimose.estimation.rows import Floats, Mask

_NEAR = 0.01
"""Sizes up to this fraction outside the observed range count as within it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Observed sizes and their costs."""

    points: Floats
    """The values of the symbols, one row for each observation."""
    values: Floats
    """One row for each observation, one column for each quantity."""
    low: list[float]
    """The minimum of each number of `Shape.extent`."""
    high: list[float]
    """The maximum of each number of `Shape.extent`."""
    grows: Mask
    """Which quantities were never smaller at a larger size. The tail may be smaller, for example:
    memory after the blocks, above the memory in use before them."""

    @classmethod
    def of(cls, shape: Shape, points: Sequence[Sequence[int]], values: Floats) -> Seen:
        extents = list(zip(*map(shape.extent, points), strict=True))
        at = np.array(points)
        grows = np.ones(values.shape[1], bool)
        for point, row in zip(at, values, strict=True):
            larger = (at >= point).all(1)
            grows &= row <= values[larger].min(0)
        return cls(at, values, [*map(min, extents)], [*map(max, extents)], grows)

    def beyond(self, extent: Sequence[float]) -> float:
        """How far a size is beyond the largest observed one, as a fraction of it."""
        both = zip(extent, self.high, strict=True)
        return max(0.0, *((x - high) / max(high, 1) for x, high in both))

    def between(self, extent: Sequence[float]) -> bool:
        """Whether a size is within the observed range, or just outside."""
        above = all(x >= low * (1 - _NEAR) for x, low in zip(extent, self.low, strict=True))
        return above and self.beyond(extent) <= _NEAR

    def within_neighbours(
        self, point: Sequence[float], row: Floats, capped: Mask, floored: Mask
    ) -> Floats:
        """The row, clipped to the values of the next larger and smaller observed sizes.

        Memory grows with the size, but a fit of sizes that are close together may bend. Growing
        quantities among `capped` have an upper limit; `floored` and growing ones a lower limit.
        """
        larger, smaller = (self.points >= point).all(1), (self.points <= point).all(1)
        if larger.any():
            row = np.where(capped & self.grows, np.minimum(row, self.values[larger].min(0)), row)
        if smaller.any():
            floored = floored | self.grows
            row = np.where(floored, np.maximum(row, self.values[smaller].max(0)), row)
        return row
