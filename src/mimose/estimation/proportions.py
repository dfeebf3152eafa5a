"""Costs of runs that vary together, for models whose memory depends on more than the input size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mimose.costs import StepObservation
from mimose.estimation.rows import Floats, Mask

_ENOUGH = 8
"""The least number of observations to draw conclusions from."""
_SAME = 0.02
"""Costs count as equal up to this relative difference."""


class Proportions(NamedTuple):
    """Relations between the costs of runs that held in all observations, for each run of a step."""

    as_before: tuple[bool, ...] = ()
    """Whether the run had the same `saved` and `recompute_peak` as the previous run."""
    backward_per_saved: tuple[float, ...] = ()
    """The least decrease of `backward_peak`, in bytes, for each byte less in `saved`."""

    @classmethod
    def of(cls, observations: Sequence[StepObservation]) -> Proportions:
        """The relations that hold in all observations; empty if there are too few."""
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
    """Whether each run but the first had the value of the previous run in every observation."""
    before, own = values[:, :-1], values[:, 1:]
    alike: Mask = np.all(np.abs(own - before) <= _SAME * own, axis=0)
    return alike


def _slopes(saved: Floats, rises: Floats) -> Floats:
    """For each run, the steepest line down from both maxima that no observation lies above."""
    saved_less, rises_less = saved.max(0) - saved, rises.max(0) - rises
    differs = saved_less > _SAME * saved.max(0)
    ratios = rises_less / np.where(differs, saved_less, 1.0)
    slopes: Floats = np.where(differs, ratios, np.inf).min(0)
    return np.where(np.isfinite(slopes), slopes, 0.0)
