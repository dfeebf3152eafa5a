"""Which dimensions of the inputs vary, found out from the observed sizes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations_with_replacement

import numpy as np
import numpy.typing as npt

from mimose.costs import InputSize, Layout
from mimose.estimation.areas import WINDOWS, areas, extents, pairs_of_areas

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Member:
    """A position in `InputSize.dims` whose value is `slope` × its symbol + `offset`."""

    position: int
    slope: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Constant dimensions, and symbols: groups of dimensions that vary together."""

    layout: Layout
    constants: tuple[tuple[int, int], ...]
    """Positions that never varied, with their values."""
    symbols: tuple[tuple[Member, ...], ...]
    """Groups of positions that vary together. A symbol's value is that of its first position."""
    batch: int | None
    """The index of the symbol that bytes are proportional to; None if there is none."""
    window: int | None = None
    """None if bytes follow polynomials of the dimensions. If they follow areas (`areas.py`) of all
    dimensions but the batch: the side of windows, 0 for no windows."""
    of_pass: tuple[int, ...] | None = None
    """The forward pass that each symbol belongs to, if there are several independent passes: the
    memory of one pass does not depend on the size of another. None if they are not independent."""
    batch_alone: bool = True
    """Whether the batch is a feature by itself. Few bytes follow it alone (a pooled row, a class
    token), so a shape without it needs one observation less."""

    @classmethod
    def of(cls, sizes: Sequence[InputSize]) -> Shape:
        """The default shape of sizes with the same layout: the first dimension is the batch."""
        constants: list[tuple[int, int]] = []
        groups: list[tuple[_Floats, list[Member]]] = []
        for position, column in enumerate(np.array([size.dims for size in sizes], float).T):
            if (column == column[0]).all():
                constants.append((position, int(column[0])))
                continue
            for first_column, members in groups:
                line = _line(first_column, column)
                if line is not None:
                    members.append(Member(position, *line))
                    break
            else:
                groups.append((column, [Member(position)]))
        symbols = tuple(tuple(members) for _, members in groups)
        batch = next((i for i, group in enumerate(symbols) if group[0].position == 0), None)
        ends = [*accumulate(len(one.dims) for one in sizes[0].passes)]
        of_pass = tuple(bisect_right(ends, group[0].position) for group in symbols)
        return cls(
            sizes[0].layout,
            tuple(constants),
            symbols,
            batch,
            of_pass=of_pass if len(set(of_pass)) > 1 else None,
        )

    def candidates(self) -> Iterator[list[Shape]]:
        """Shapes that may explain the bytes, in the order in which to try them.

        1. Areas, if several dimensions vary: they have fewer terms than polynomials.
        2. This shape.
        3. Shapes with another symbol or no symbol as the batch, or with dependent passes.
        4. Areas in windows.
        """
        free = len(self.symbols) - (self.batch is not None)
        in_areas = free > 1 and self.of_pass is None
        if in_areas:
            yield [replace(self, window=0)]
        yield [self]
        batches = {None, *range(len(self.symbols))} - {self.batch}
        others = [replace(self, batch=batch) for batch in batches]
        yield others if self.of_pass is None else [*others, replace(self, of_pass=None)]
        if in_areas:
            yield [replace(self, window=window) for window in WINDOWS]

    @property
    def varying(self) -> frozenset[int]:
        """The positions of dimensions that vary."""
        return frozenset(member.position for group in self.symbols for member in group)

    def point(self, size: InputSize) -> list[int]:
        """The value of each symbol at a size of this shape."""
        return [size.dims[group[0].position] for group in self.symbols]

    def covering_point(self, size: InputSize) -> list[float] | None:
        """The value of each symbol at the smallest size of this shape that is at least `size`.

        None if there is no such size.
        """
        if size.layout != self.layout:
            return None
        if any(size.dims[position] > value for position, value in self.constants):
            return None
        dims = size.dims
        return [max((dims[m.position] - m.offset) / m.slope for m in g) for g in self.symbols]

    def describes(self, size: InputSize) -> bool:
        """Whether a size has exactly this shape."""
        if size.layout != self.layout:
            return False
        if any(size.dims[position] != value for position, value in self.constants):
            return False
        return all(
            len({round((size.dims[m.position] - m.offset) / m.slope, 6) for m in group}) == 1
            for group in self.symbols
        )

    def features(self, point: Sequence[float]) -> list[float]:
        """1, the batch if it counts alone, then the batch times each area or times each monomial of
        the other symbols up to degree two.

        Without NumPy: predictions are made during steps, where code that has not run for a while is
        slow, and NumPy's many small functions most of all.
        """
        batch, others = self._batch_and_others(point)
        if self.window is None:
            products = [*others, *self._products(others)]
        else:
            products = areas(others, self.window)
        alone = batch if self.batch_alone else []
        return [1.0, *alone, *(math.prod(batch) * x for x in products)]

    def _batch_and_others(self, point: Sequence[float]) -> tuple[list[float], list[float]]:
        """The value of the batch, if there is one, and the values of all other symbols."""
        batch = [] if self.batch is None else [point[self.batch]]
        return batch, [x for i, x in enumerate(point) if i != self.batch]

    def _products(self, others: Sequence[float]) -> list[float]:
        """The product of every two symbols (squares included) that belong to the same pass."""
        if self.of_pass is None:
            return [a * b for a, b in combinations_with_replacement(others, 2)]
        passes = [p for i, p in enumerate(self.of_pass) if i != self.batch]
        pairs = combinations_with_replacement(zip(others, passes, strict=True), 2)
        return [a * b for (a, pass_a), (b, pass_b) in pairs if pass_a == pass_b]

    def choices(self, features: int) -> list[list[int]]:
        """The sets of features, by index, that one quantity may consist of."""
        if self.window is None:
            return [list(range(features))]
        always = list(range(1 if self.batch is None else 2))
        return [[*always, len(always) + i, len(always) + j] for i, j in pairs_of_areas(self.window)]

    def extent(self, point: Sequence[float]) -> list[float]:
        """The numbers that must be within their observed ranges for a point to be within range."""
        if self.window is None:
            return list(point)
        batch, others = self._batch_and_others(point)
        return [*batch, *extents(others, self.window)]


def _line(x: _Floats, y: _Floats) -> tuple[float, float] | None:
    """The (slope, offset) with which y follows x on a rising line; None if it does not.

    Different dimensions need three distinct points, since any two points lie on a line.
    """
    if (x == y).all():
        return 1.0, 0.0
    if len(np.unique(x)) < 3:
        return None
    low, high = int(x.argmin()), int(x.argmax())
    slope = float((y[high] - y[low]) / (x[high] - x[low]))
    offset = float(y[low] - slope * x[low])
    follows = slope > 0 and np.abs(slope * x + offset - y).max() < 1e-6
    return (slope, offset) if follows else None
