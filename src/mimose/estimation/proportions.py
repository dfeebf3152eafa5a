"""Which quantities of runs have varied together, where memory depends on more than the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mimose.costs import StepObservation
from mimose.estimation.rows import Floats, Mask

_ENOUGH = 8
"""Observations that it takes to tell."""
_SAME = 0.02
"""By how much a proportion may vary, as a share of it, to count as the same."""


class Proportions(NamedTuple):
    """For each run of a step, by all observations."""

    as_before: tuple[bool, ...] = ()
    """Whether it took what the run before it took."""
    backward_per_saved: tuple[float, ...] = ()
    """By how much its backward rose less, at least, for each byte that its forward saved less."""

    @classmethod
    def of(cls, observations: Sequence[StepObservation]) -> Proportions:
        """What these have in common; nothing if they are too few."""
        if len(observations) < _ENOUGH:
            return cls()
        saved, spikes, backwards = np.array(
            [
                [(run.saved, run.recompute_peak, run.backward_peak) for run in each.runs]
                for each in observations
            ],
            float,
        ).transpose(2, 0, 1)
        alike = _alike(saved) & _alike(spikes)
        return cls((False, *alike.tolist()), tuple(_slopes(saved, backwards).tolist()))


def _alike(values: Floats) -> Mask:
    """Whether each run had the value of the one before it in every observation."""
    before, own = values[:, :-1], values[:, 1:]
    alike: Mask = np.all(np.abs(own - before) <= _SAME * own, axis=0)
    return alike


def _slopes(saved: Floats, rises: Floats) -> Floats:
    """The steepest line for each run, from the most that was seen of both down, that no observation
    lies above."""
    less, lower = saved.max(0) - saved, rises.max(0) - rises
    far = less > _SAME * saved.max(0)
    slopes: Floats = np.where(far, lower / np.where(far, less, 1.0), np.inf).min(0)
    return np.where(np.isfinite(slopes), slopes, 0.0)
