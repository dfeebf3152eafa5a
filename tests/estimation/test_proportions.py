"""What runs that vary have in common is told by all observations, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chains import chain, run
from mimose.costs import StepObservation
from mimose.estimation import Proportions

COUNT = 10


def observed(*runs: tuple[int, int]) -> StepObservation:
    """A step whose runs save, and rise in their backwards by, so much."""
    costs = [run(saved=saved, recompute_peak=2 * saved, backward_peak=rise) for saved, rise in runs]
    return StepObservation(
        pattern=tuple((k, 0) for k in range(len(runs))),
        profile=chain(*costs),
        gradients_allocated=(0,) * len(runs),
        all_gradients_allocated=0,
        allocates=False,
    )


def test_a_run_is_like_the_one_before_it_if_it_always_was() -> None:
    steps = [observed((100 * k, 0), (101 * k, 0), (50 * k, 0)) for k in range(1, COUNT)]
    assert Proportions.of(steps).as_before == (False, True, False)
    steps[3] = observed((400, 0), (300, 0), (200, 0))
    assert Proportions.of(steps).as_before == (False, False, False)


def test_runs_that_save_alike_and_peak_otherwise_are_not_alike() -> None:
    steps = [observed((100 * k, 0), (100 * k, 0)) for k in range(1, COUNT)]
    first, second = steps[2].profile.runs
    odd = (first, second._replace(recompute_peak=second.recompute_peak * 2))
    steps[2] = replace(steps[2], profile=replace(steps[2].profile, runs=odd))
    assert Proportions.of(steps).as_before == (False, False)


def test_no_backward_was_higher_than_what_is_counted_on() -> None:
    pairs = [(100 * k, 30 + max(40 * k, 10 * k * k // 3)) for k in range(1, COUNT)]
    (slope,) = Proportions.of([observed(pair) for pair in pairs]).backward_per_saved
    most_saved, highest = pairs[-1]
    assert slope > 0
    for saved, rise in pairs:
        assert rise <= highest - slope * (most_saved - saved) + 1e-6


def test_a_backward_that_does_not_go_with_its_forward_is_counted_on_in_full() -> None:
    pairs = [(100 * k, 70 * (COUNT - k)) for k in range(1, COUNT)]
    assert Proportions.of([observed(pair) for pair in pairs]).backward_per_saved == (0.0,)


@pytest.mark.parametrize("saved", [0, 100])
def test_what_never_varied_tells_nothing(saved: int) -> None:
    found = Proportions.of([observed((saved, 5)) for _ in range(COUNT)])
    assert found.backward_per_saved == (0.0,)


def test_a_few_observations_tell_nothing() -> None:
    assert Proportions.of([observed((100 * k, k)) for k in range(1, 5)]) == Proportions()
