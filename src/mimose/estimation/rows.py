"""A profile's bytes as one row of numbers, so that all quantities are fitted at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from mimose.costs import SUBTRACTED, InputSize, Option, Profile, RunCost, peak

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_QUANTITIES = RunCost._fields[: RunCost._fields.index("nanoseconds")]
BYTES = len(_QUANTITIES)
"""The number of fields of a RunCost in bytes. Times and flags come after them."""
SAVED = _QUANTITIES.index("saved")
OF_STEP = 4
"""The number of quantities of the step: head_forward, head_backward, tail, prelude."""
_SUBTRACTED = [name in SUBTRACTED for name in _QUANTITIES]
_SIGNED = [name in ("boundary", "backward_entry", "between_blocks_peak") for name in _QUANTITIES]

Others = tuple[int, bool, bool, int]
"""The fields of a RunCost that are not in the row."""


@cache
def signs_of(runs: int) -> Floats:
    """-1 for each number of a row that is subtracted in peaks, 1 for all others."""
    return np.where([*_SUBTRACTED * runs, *[False] * OF_STEP], -1.0, 1.0)


@cache
def signed(runs: int) -> Mask:
    """Which numbers of a row may be negative."""
    return np.array([*_SIGNED * runs, *[False] * OF_STEP])


def row_of(profile: Profile) -> list[int]:
    """The fitted numbers of a profile: the bytes of each run, then those of the step."""
    row = [number for run in profile.runs for number in run[:BYTES]]
    return [*row, profile.head_forward, profile.head_backward, profile.tail, profile.prelude or 0]


def profile_of(size: InputSize, numbers: Sequence[int], others: Sequence[Others]) -> Profile:
    """The profile with these numbers in its row."""
    runs = [
        RunCost._make((*numbers[k * BYTES : (k + 1) * BYTES], *rest))
        for k, rest in enumerate(others)
    ]
    head_forward, head_backward, tail, prelude = numbers[-OF_STEP:]
    return Profile(size, tuple(runs), head_forward, head_backward, tail, prelude)


_ANY_SIZE = InputSize((), ())


def peaks(fixed: tuple[bool, ...], rows: Floats) -> Floats:
    """The peaks of each row: one column with all runs kept, one with all recomputed."""
    both = [_peaks_of_row(fixed, tuple(row)) for row in rows.round().astype(int).tolist()]
    return np.array(both, float).reshape(-1, 2)


@lru_cache(maxsize=256)
def _peaks_of_row(fixed: tuple[bool, ...], row: tuple[int, ...]) -> tuple[int, int]:
    """The peaks of one row. Cached, because each fit needs those of all observations."""
    profile = profile_of(_ANY_SIZE, row, [(0, stays, False, 0) for stays in fixed])
    return peaks_of(profile)


def peaks_of(profile: Profile) -> tuple[int, int]:
    """The peaks with all runs kept, and with all recomputed."""
    kept, recomputed = ([end] * len(profile.runs) for end in (Option.KEEP, Option.RECOMPUTE))
    return max(1, peak(profile, kept)), max(1, peak(profile, recomputed))
