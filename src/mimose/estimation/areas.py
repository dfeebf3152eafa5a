"""Products of dimensions that are counted in steps: images in strides, patches and windows.

A network that looks at an image in strides of 4 sees ⌈H/4⌉ × ⌈W/4⌉ pixels, or ⌊H/4⌋ × ⌊W/4⌋. Its
bytes follow this area rather than the height and the width. A quantity consists of a constant, one
such area and at most one other: its square (attention), the area in strides of twice the length (a
block that halves the image), or the area in windows, to whose multiples some networks pad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

_STRIDES = (1, 2, 4, 8, 16, 32)
WINDOWS = (7, 8, 12, 14, 16, 4, 6, 3)
"""Sides of windows that networks use, in strides."""

_Step = tuple[Callable[[float], int], int]
"""How a dimension is rounded, and to multiples of what."""


@cache
def _steps(window: int) -> list[_Step]:
    """Strides rounded up, then all but the first rounded down, then windows rounded up."""
    down = [(math.floor, stride) for stride in _STRIDES[1:]]
    in_windows = [(math.ceil, window * stride) for stride in _STRIDES if window]
    return [*((math.ceil, stride) for stride in _STRIDES), *down, *in_windows]


def areas(dims: Sequence[float], window: int) -> list[float]:
    """The area of these dimensions in all steps, then the squares of these areas."""
    once = [_area(dims, step) for step in _steps(window)]
    return [*once, *(area * area for area in once)]


def extents(dims: Sequence[float], window: int) -> list[float]:
    """The areas that must all lie between those of observed sizes for a size to do so."""
    return [_area(dims, step) for step in _steps(window) if step[0] is math.ceil]


def _area(dims: Sequence[float], step: _Step) -> float:
    rounded, unit = step
    return math.prod(unit * rounded(x / unit) for x in dims)


@cache
def pairs(window: int) -> list[tuple[int, int]]:
    """Which two of the `areas` a quantity may consist of, by their index."""
    up, all_steps = range(len(_STRIDES)), len(_steps(window))
    down = [0, *range(len(up), 2 * len(up) - 1)]
    squares = [(i, all_steps + i) for i in range(2 * len(up) - 1)]
    in_windows = [(i, 2 * len(up) - 1 + i) for i in up if window]
    return [*squares, *pairwise(up), *pairwise(down), *in_windows]
