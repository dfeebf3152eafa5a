"""Which dimensions of the inputs vary, found out from the sizes seen."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations_with_replacement

import numpy as np
import numpy.typing as npt

from mimose.costs import InputSize, Layout
from mimose.estimation.areas import WINDOWS, areas, pairs, ranges

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Member:
    """A position whose dimension is `slope` times its symbol plus `offset`."""

    position: int
    slope: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Constant dimensions, dimensions that vary together (a symbol each), and the batch."""

    layout: Layout
    constants: tuple[tuple[int, int], ...]
    """Positions that never varied, with their value."""
    symbols: tuple[tuple[Member, ...], ...]
    """Positions that vary together, a group each; the first stands for all."""
    batch: int | None
    """The symbol that bytes are proportional to, if there is one."""
    window: int | None = None
    """If bytes follow the area of all dimensions but the batch in steps (`areas.py`), the side of
    windows, 0 for none; None if they follow each dimension."""
    of_pass: tuple[int, ...] | None = None
    """The pass that each symbol belongs to, if there are several that do not meet: what one takes
    does not depend on the other's size."""

    @classmethod
    def of(cls, sizes: Sequence[InputSize]) -> Shape:
        """The shape of these sizes, of one layout. The very first dimension is taken for the
        batch; `alternatives` has the others."""
        constants: list[tuple[int, int]] = []
        groups: list[tuple[_Floats, list[Member]]] = []
        for position, column in enumerate(np.array([size.dims for size in sizes], float).T):
            if (column == column[0]).all():
                constants.append((position, int(column[0])))
                continue
            for leader, members in groups:
                line = _line(leader, column)
                if line is not None:
                    members.append(Member(position, *line))
                    break
            else:
                groups.append((column, [Member(position)]))
        symbols = tuple(tuple(members) for _, members in groups)
        first = (i for i, group in enumerate(symbols) if group[0].position == 0)
        ends = [*accumulate(len(one.dims) for one in sizes[0].passes)]
        of_pass = tuple(bisect_right(ends, group[0].position) for group in symbols)
        several = len(set(of_pass)) > 1
        layout, batch = sizes[0].layout, next(first, None)
        return cls(layout, tuple(constants), symbols, batch, of_pass=of_pass if several else None)

    def candidates(self) -> Iterator[list[Shape]]:
        """Shapes that may explain bytes, in the order in which to try them.

        This one; areas of several dimensions even before it, since they have fewer terms; then no
        symbol, or another one, for the batch, or passes that meet; areas in windows in the end.
        """
        free = len(self.symbols) - (self.batch is not None)
        areas = [replace(self, window=window) for window in (0, *WINDOWS)]
        if self.of_pass is not None or not free:
            areas = []
        if free > 1:
            yield areas[:1]
        yield [self]
        batches = {None, *range(len(self.symbols))} - {self.batch}
        others = [replace(self, batch=batch) for batch in batches]
        if self.of_pass is not None:
            others.append(replace(self, of_pass=None))
        yield others if free > 1 else [*others, *areas[:1]]
        yield areas[1:]

    @property
    def varying(self) -> frozenset[int]:
        """The positions of dimensions that vary."""
        return frozenset(member.position for group in self.symbols for member in group)

    def point(self, size: InputSize) -> list[int]:
        """The varying dimensions of a size that has this shape."""
        return [size.dims[group[0].position] for group in self.symbols]

    def covering_point(self, size: InputSize) -> list[float] | None:
        """The varying dimensions of a size that is at least `size` and has this shape."""
        if size.layout != self.layout:
            return None
        if any(size.dims[position] > value for position, value in self.constants):
            return None
        dims = size.dims
        return [max((dims[m.position] - m.offset) / m.slope for m in g) for g in self.symbols]

    def describes(self, size: InputSize) -> bool:
        """Whether a size is of just this shape, not only covered by it."""
        if size.layout != self.layout:
            return False
        if any(size.dims[position] != value for position, value in self.constants):
            return False
        return all(
            len({round((size.dims[m.position] - m.offset) / m.slope, 6) for m in group}) == 1
            for group in self.symbols
        )

    def features(self, point: Sequence[float]) -> list[float]:
        """1, then the batch times each area in steps, or times each monomial of the other
        dimensions up to degree two.

        In plain numbers: predictions are made in the middle of steps, where whatever has not run
        for a while is slow, and NumPy's many small functions most of all.
        """
        batch, others = self._batch_and_others(point)
        if self.window is None:
            products = [*others, *self._products(others)]
        else:
            products = areas(others, self.window)
        return [1.0, *batch, *(math.prod(batch) * x for x in products)]

    def _batch_and_others(self, point: Sequence[float]) -> tuple[list[float], list[float]]:
        """The batch, if there is one, and all other dimensions."""
        batch = [] if self.batch is None else [point[self.batch]]
        return batch, [x for i, x in enumerate(point) if i != self.batch]

    def _products(self, others: Sequence[float]) -> list[float]:
        """Of every two dimensions that meet."""
        meeting = list(combinations_with_replacement(range(len(others)), 2))
        if self.of_pass is not None:
            of = [p for i, p in enumerate(self.of_pass) if i != self.batch]
            meeting = [(i, j) for i, j in meeting if of[i] == of[j]]
        return [others[i] * others[j] for i, j in meeting]

    def choices(self, features: int) -> list[list[int]]:
        """Which of so many features one quantity may consist of."""
        if self.window is None:
            return [list(range(features))]
        always = list(range(1 if self.batch is None else 2))
        return [[*always, len(always) + i, len(always) + j] for i, j in pairs(self.window)]

    def extent(self, point: Sequence[float]) -> list[float]:
        """What must lie between the sizes seen for a point to do so."""
        if self.window is None:
            return list(point)
        batch, others = self._batch_and_others(point)
        return [*batch, *ranges(others, self.window)]


def _line(leader: _Floats, column: _Floats) -> tuple[float, float] | None:
    """The rising line by which one dimension follows from another, if it does.

    Equal columns always do; others need three distinct points, since two lie on a line anyway.
    """
    if (leader == column).all():
        return 1.0, 0.0
    if len(np.unique(leader)) < 3:
        return None
    low, high = int(leader.argmin()), int(leader.argmax())
    slope = float((column[high] - column[low]) / (leader[high] - leader[low]))
    offset = float(column[low] - slope * leader[low])
    follows = slope > 0 and np.abs(slope * leader + offset - column).max() < 1e-6
    return (slope, offset) if follows else None
