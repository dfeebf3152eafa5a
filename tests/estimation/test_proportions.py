"""Slopes between amounts of memory hold in all observations, or are 0."""

from __future__ import annotations

import random

import pytest

from chains import chain, run
from mimose.costs import StepObservation
from mimose.estimation import Proportions

COUNT = 10


def observed(*runs: tuple[int, int], boundary: int = 0, workspace: int = 0) -> StepObservation:
    """A step whose runs have these (saved bytes, backward peak)."""
    costs = [
        run(
            boundary=boundary,
            saved=saved,
            recompute_peak=2 * saved + workspace,
            backward_peak=rise,
        )
        for saved, rise in runs
    ]
    return StepObservation(
        pattern=tuple((k, 0) for k in range(len(runs))),
        profile=chain(*costs),
        gradients_allocated=(0,) * len(runs),
        all_gradients_allocated=0,
        allocates=False,
    )


def test_a_forward_follows_the_growth_of_the_previous_run() -> None:
    steps = [observed((100 * k, 0), (50 * k, 0), (100 * k, 0)) for k in range(1, COUNT)]
    assert Proportions.of(steps).forward == pytest.approx((0, 1, 4))


def test_memory_that_never_varies_is_not_taken_for_less() -> None:
    """A workspace of constant size: half the growth does not mean half the rise."""
    steps = [observed((100 * k, 0), (100 * k, 0), workspace=10_000) for k in range(1, COUNT)]
    assert Proportions.of(steps).forward == pytest.approx((0, 2))


def test_a_forward_that_once_rose_alone_is_expected_at_its_maximum() -> None:
    steps = [observed((100 * k, 0), (100 * k, 0)) for k in range(1, COUNT)]
    steps[3] = observed((100, 0), (900, 0))
    assert Proportions.of(steps).forward == (0, 0)


def test_memory_that_varies_independently_has_no_slope() -> None:
    draw = random.Random(0)
    steps = [observed((draw.randint(1, 1000), draw.randint(1, 1000))) for _ in range(COUNT)]
    assert Proportions.of(steps).backward == (0,)


def test_an_output_that_varies_tells_nothing_of_what_is_saved() -> None:
    steps = [observed((500, 70), (500, 70), boundary=100 * k) for k in range(1, COUNT)]
    found = Proportions.of(steps)
    assert found.recompute == (0, 0)
    assert found.backward == (0, 0)


def test_no_observed_backward_is_above_the_line() -> None:
    pairs = [(100 * k, 30 + max(40 * k, 10 * k * k // 3)) for k in range(1, COUNT)]
    (slope,) = Proportions.of([observed(pair) for pair in pairs]).backward
    most_saved, highest = pairs[-1]
    assert slope > 0
    for saved, rise in pairs:
        assert rise <= highest - slope * (most_saved - saved) + 1e-6


def test_the_backward_of_an_evicted_run_also_saves_less_again() -> None:
    found = Proportions.of([observed((100 * k, 300 * k)) for k in range(1, COUNT)])
    assert found.backward == pytest.approx((3,))
    assert found.recompute == pytest.approx((4,))


@pytest.mark.parametrize("saved", [0, 100])
def test_costs_that_never_varied_have_no_slope(saved: int) -> None:
    found = Proportions.of([observed((saved, 5)) for _ in range(COUNT)])
    assert found == ((0,), (0,), (0,))


def test_few_observations_give_no_slopes() -> None:
    assert Proportions.of([observed((100 * k, k)) for k in range(1, 5)]) == Proportions()
