"""The sizes that were observed: which others lie between them, and what they bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mimose.estimation.dimensions import Shape
from mimose.estimation.rows import Floats, Mask

_NEAR = 0.01
"""How far outside those observed a size may be, as a share, to count as between them."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Observed sizes and what they cost."""

    points: Floats
    """The varying dimensions, one row an observation."""
    values: Floats
    """One row an observation, one column a quantity."""
    low: list[float]
    """The least of each extent (`Shape.extent`)."""
    high: list[float]
    grows: Mask
    """Which quantities were never less at a larger size. Others are: what is left after the blocks,
    above what was there before them."""

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
        """How far a size lies beyond the largest, as a share of it."""
        both = zip(extent, self.high, strict=True)
        return max(0.0, *((x - high) / max(high, 1) for x, high in both))

    def between(self, extent: Sequence[float]) -> bool:
        """Whether a size lies between those observed, or next to them."""
        above = all(x >= low * (1 - _NEAR) for x, low in zip(extent, self.low, strict=True))
        return above and self.beyond(extent) <= _NEAR

    def within_neighbours(
        self, point: Sequence[float], row: Floats, capped: Mask, floored: Mask
    ) -> Floats:
        """The row, no more than at any larger size and no less than at any smaller one: memory
        grows with size, and where sizes lie close together, a fit may bend far away from them."""
        larger, smaller = (self.points >= point).all(1), (self.points <= point).all(1)
        if larger.any():
            row = np.where(capped & self.grows, np.minimum(row, self.values[larger].min(0)), row)
        if smaller.any():
            floored = floored | self.grows
            row = np.where(floored, np.maximum(row, self.values[smaller].max(0)), row)
        return row
