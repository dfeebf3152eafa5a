"""Memory of runs that varies together, for models whose memory depends on more than the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mimose.costs import RunCost, StepObservation
from mimose.estimation.rows import Floats

_ENOUGH = 8
"""The least number of observations to draw conclusions from."""
_SAME = 0.02
"""Growths count as equal up to this relative difference."""
_STEADY = 0.5
"""The least slope in any observation, relative to the median: below it, two amounts of memory have
varied together by chance."""


class Proportions(NamedTuple):
    """How much less memory runs take where the growth of a run is less than predicted.

    The growth of a run is what it adds to the memory in use: what it saves, and its output. Each
    tuple has one slope for each run, in bytes for each byte of growth. A slope is 0 unless all
    observations agree on it.
    """

    forward: tuple[float, ...] = ()
    """How much less the forward rises, for each byte that the previous run's growth is less."""
    backward: tuple[float, ...] = ()
    """How much less the backward rises if the run is kept, for each byte of its own growth."""
    recompute: tuple[float, ...] = ()
    """The same if the run is recomputed."""

    @classmethod
    def of(cls, observations: Sequence[StepObservation]) -> Proportions:
        """The slopes that hold in all observations; none if there are too few."""
        if len(observations) < _ENOUGH:
            return cls()
        growths, forwards, backwards, recomputes = np.array(
            [_amounts(each.runs) for each in observations], float
        ).transpose(1, 0, 2)
        return cls(
            (0.0, *_slopes(growths[:, :-1], forwards[:, 1:])),
            _slopes(growths, backwards),
            _slopes(growths, recomputes),
        )


def _amounts(runs: Sequence[RunCost]) -> tuple[list[int], ...]:
    """For each run: its growth, and the rise in its forward, its backward and its recompute."""
    keeps = [run.menu[0] for run in runs]
    growths = [keep.forward_held for keep in keeps]
    for k, run in enumerate(runs[1:]):
        growths[k] += run.boundary
    ends = [*(run.between_blocks_peak for run in runs[1:]), 0]
    return (
        growths,
        [max(k.forward_peak, g + e) for k, g, e in zip(keeps, growths, ends, strict=True)],
        [run.output_saved + run.backward_peak for run in runs],
        [max(run.recompute_peak, run.saved + run.backward_peak) for run in runs],
    )


def _slopes(growths: Floats, rises: Floats) -> tuple[float, ...]:
    """For each run, the steepest line down from both maxima that no observation lies above."""
    growth_less, rise_less = growths.max(0) - growths, rises.max(0) - rises
    differs = growth_less > _SAME * growths.max(0)
    slopes = []
    for less, rise, used in zip(growth_less.T, rise_less.T, differs.T, strict=True):
        ratios = rise[used] / less[used]
        least = float(ratios.min()) if used.any() else 0.0
        slopes.append(least if least and least >= _STEADY * float(np.median(ratios)) else 0.0)
    return tuple(slopes)
