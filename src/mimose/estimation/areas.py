"""Areas of images in strides, patches and windows.

A network with stride 4 turns an H × W image into ⌈H/4⌉ × ⌈W/4⌉ pixels, or ⌊H/4⌋ × ⌊W/4⌋. Its bytes
follow this area rather than the height and the width. A quantity consists of a constant, one such
area, and at most one other term: the square of the area (attention), the area at twice the stride
(a block that halves the image), or the area padded to multiples of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

_STRIDES = (1, 2, 4, 8, 16, 32)
WINDOWS = (7, 8, 12, 14, 16, 4, 6, 3)
"""Sides of windows that networks use, in strides, in the order in which they are tried."""

_Rounding = tuple[Callable[[float], int], int]
"""How a dimension is rounded (ceil or floor), and to multiples of what number."""


@cache
def _roundings(window: int) -> list[_Rounding]:
    """Rounding up to strides, then down to all but the first, then up to windows."""
    down = [(math.floor, stride) for stride in _STRIDES[1:]]
    in_windows = [(math.ceil, window * stride) for stride in _STRIDES if window]
    return [*((math.ceil, stride) for stride in _STRIDES), *down, *in_windows]


def areas(dims: Sequence[float], window: int) -> list[float]:
    """The area under each rounding, then the squares of these areas."""
    rounded = [_area(dims, rounding) for rounding in _roundings(window)]
    return [*rounded, *(area * area for area in rounded)]


def extents(dims: Sequence[float], window: int) -> list[float]:
    """The areas that must be within the range of observed areas for a size to be within range."""
    return [
        _area(dims, (round_, unit)) for round_, unit in _roundings(window) if round_ is math.ceil
    ]


def _area(dims: Sequence[float], rounding: _Rounding) -> float:
    round_, unit = rounding
    return math.prod(unit * round_(x / unit) for x in dims)


@cache
def pairs_of_areas(window: int) -> list[tuple[int, int]]:
    """The pairs of indices into `areas` that a quantity may consist of."""
    up, squares_start = range(len(_STRIDES)), len(_roundings(window))
    windows_start = 2 * len(up) - 1
    down = [0, *range(len(up), windows_start)]
    squares = [(i, squares_start + i) for i in range(windows_start)]
    in_windows = [(i, windows_start + i) for i in up if window]
    return [*squares, *pairwise(up), *pairwise(down), *in_windows]
