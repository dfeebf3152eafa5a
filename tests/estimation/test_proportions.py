"""Relations between the costs of runs hold in all observations, or are not used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chains import chain, run
from mimose.costs import StepObservation
from mimose.estimation import Proportions

COUNT = 10


def observed(*runs: tuple[int, int]) -> StepObservation:
    """A step whose runs have these (saved bytes, backward peak)."""
    costs = [run(saved=saved, recompute_peak=2 * saved, backward_peak=rise) for saved, rise in runs]
    return StepObservation(
        pattern=tuple((k, 0) for k in range(len(runs))),
        profile=chain(*costs),
        gradients_allocated=(0,) * len(runs),
        all_gradients_allocated=0,
        allocates=False,
    )


def test_a_run_equals_the_previous_one_if_it_did_in_all_observations() -> None:
    steps = [observed((100 * k, 0), (101 * k, 0), (50 * k, 0)) for k in range(1, COUNT)]
    assert Proportions.of(steps).as_before == (False, True, False)
    steps[3] = observed((400, 0), (300, 0), (200, 0))
    assert Proportions.of(steps).as_before == (False, False, False)


def test_runs_with_equal_saved_bytes_and_other_peaks_are_not_equal() -> None:
    steps = [observed((100 * k, 0), (100 * k, 0)) for k in range(1, COUNT)]
    first, second = steps[2].profile.runs
    odd = (first, second._replace(recompute_peak=second.recompute_peak * 2))
    steps[2] = replace(steps[2], profile=replace(steps[2].profile, runs=odd))
    assert Proportions.of(steps).as_before == (False, False)


def test_no_observed_backward_is_above_the_line() -> None:
    pairs = [(100 * k, 30 + max(40 * k, 10 * k * k // 3)) for k in range(1, COUNT)]
    (slope,) = Proportions.of([observed(pair) for pair in pairs]).backward_per_saved
    most_saved, highest = pairs[-1]
    assert slope > 0
    for saved, rise in pairs:
        assert rise <= highest - slope * (most_saved - saved) + 1e-6


def test_a_backward_that_does_not_follow_its_forward_is_assumed_at_its_maximum() -> None:
    pairs = [(100 * k, 70 * (COUNT - k)) for k in range(1, COUNT)]
    assert Proportions.of([observed(pair) for pair in pairs]).backward_per_saved == (0.0,)


@pytest.mark.parametrize("saved", [0, 100])
def test_costs_that_never_varied_have_no_slope(saved: int) -> None:
    found = Proportions.of([observed((saved, 5)) for _ in range(COUNT)])
    assert found.backward_per_saved == (0.0,)


def test_few_observations_give_no_proportions() -> None:
    assert Proportions.of([observed((100 * k, k)) for k in range(1, 5)]) == Proportions()
