"""Products of dimensions that are counted in steps: images in strides, patches and windows.

A network that looks at an image in strides of 4 sees ⌈H/4⌉ × ⌈W/4⌉ pixels, or ⌊H/4⌋ × ⌊W/4⌋, and
bytes follow this area rather than height and width. A quantity consists of one such area and of at
most one other: its square (attention), the area in strides of twice the length (a block that halves
the image), or that in windows of some strides, to whose multiples an image is padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

_STRIDES = (1, 2, 4, 8, 16, 32)
WINDOWS = (7, 8, 12, 14, 16, 3, 6)
"""Sides of windows that networks use, in pixels of their stride."""


def areas(dims: Sequence[float], window: int) -> list[float]:
    """The area in each stride, rounded up; in windows; in each stride but the first, rounded down;
    and the squares of those in strides."""
    in_strides = [_rounded_up(dims, stride) for stride in _STRIDES]
    in_windows = [_rounded_up(dims, window * stride) for stride in _STRIDES] if window else []
    down = [math.prod(stride * (x // stride) for x in dims) for stride in _STRIDES[1:]]
    squares = [area * area for area in (*in_strides, *down)]
    return [*in_strides, *in_windows, *down, *squares]


def ranges(dims: Sequence[float], window: int) -> list[float]:
    """The areas, rounded up, that must lie between those seen for a size to do so."""
    units = [*_STRIDES, *(window * stride for stride in _STRIDES if window)]
    return [_rounded_up(dims, unit) for unit in units]


def _rounded_up(dims: Sequence[float], unit: int) -> float:
    return math.prod(unit * math.ceil(x / unit) for x in dims)


@cache
def pairs(window: int) -> list[tuple[int, int]]:
    """Which two of the `areas` a quantity may consist of."""
    count, windows = len(_STRIDES), len(_STRIDES) if window else 0
    in_strides = list(range(count))
    down = [0, *range(count + windows, 2 * count - 1 + windows)]
    squares = [
        (area, 2 * count - 1 + windows + n) for n, area in enumerate((*in_strides, *down[1:]))
    ]
    in_windows = [(area, count + area) for area in in_strides if window]
    return [*squares, *pairwise(in_strides), *pairwise(down), *in_windows]
