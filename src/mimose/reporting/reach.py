"""The longest input that fits into a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.reporting.outlook import Outlook
from mimose.reporting.recorded_lengths import RecordedLengths

_MOST_EXTRAPOLATED = 64
"""The longest length to extrapolate to, as a multiple of the longest recorded one."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The longest input that fits."""

    length: int
    extrapolated: bool
    """Whether it is longer than any recorded input, and therefore approximate."""


def reach_of(outlook: Outlook, budget: int, lengths: RecordedLengths) -> Reach | None:
    """The longest input that fits: exact within the recorded lengths, a parabola beyond them."""
    longest = lengths.longest

    def need(length: int) -> float | None:
        profile = outlook.profile(lengths.at(length))
        return None if profile is None else float(outlook.least_budget(profile))

    top = need(longest)
    if top is None:
        return None
    if top > budget:
        return Reach(_last(lambda n: (need(n) or 0.0) <= budget, 0, longest), False)
    beyond = _parabola(sorted({longest * i // 12 for i in range(4, 13)}), need)
    if beyond is None:
        return Reach(longest, False)
    found = _last(lambda n: beyond(n) <= budget, longest, _MOST_EXTRAPOLATED * longest)
    return Reach(found, extrapolated=found > longest)


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Binary search for the last number in low…high that fits; `low` must fit."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _parabola(
    lengths: Sequence[int], need: Callable[[int], float | None]
) -> Callable[[float], float] | None:
    """Least-squares parabola through these lengths, shifted to pass through the last one."""
    known = [(n, needed) for n in lengths if (needed := need(n)) is not None]
    if len(known) < 3:
        return None
    at, needs = np.array(known, float).T
    bend, slope, _ = np.polyfit(at, needs, 2)
    last, top = known[-1]
    bend = max(0.0, float(bend))
    rise = max(0.0, float(slope) + 2 * bend * last)
    return lambda n: top + (n - last) * (rise + bend * (n - last))
