"""Quantities with kinks and jumps are never predicted too low, and trusted where possible."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chains import steady
from mimose.costs import Option, StepObservation, peak
from mimose.estimation import Estimator
from mimose.estimation.prediction import State
from observed import Law, assert_exact, assert_no_lower, seen, size, taught, told

ALONE = ((0, 0),)
"""One run, so that each quantity is a part of the peak that is large enough to show its kinks."""


def alone(length: int, law: Law) -> StepObservation:
    return seen(8, length, law=law, pattern=ALONE)


def state_at(estimator: Estimator, length: int) -> State | None:
    prediction = estimator.predict(size(8, length))
    return None if prediction is None else prediction.state


def in_chunks(chunk: int, slope: int, rest: int = 0, start: int = 0) -> Law:
    """A loss in chunks: its logits grow with the length only up to the size of a chunk."""

    def law(dims: tuple[int, ...]) -> list[int]:
        return [start + slope * min(dims[1], chunk) + rest * dims[1]]

    return law


@steady
@given(
    st.builds(
        in_chunks,
        st.integers(20, 500),
        st.integers(0, 4000),
        st.integers(0, 4000),
        st.integers(0, 10**6),
    ),
    st.lists(st.integers(16, 512), min_size=4, max_size=9, unique=True),
)
def test_a_quantity_that_bends_down_is_not_predicted_too_low(law: Law, lengths: list[int]) -> None:
    estimator = taught(alone(n, law) for n in lengths)
    assume(estimator.ready)
    for n in range(min(lengths), max(lengths) + 1):
        truth = alone(n, law)
        slack = 1 + peak(truth.profile, [Option.KEEP]) // 1000
        assert_no_lower(estimator.predict(size(8, n)), truth, slack)


def test_a_quantity_that_bends_down_is_exact_on_both_sides_of_the_bend() -> None:
    law = in_chunks(256, 4000, rest=1000, start=50_000)
    estimator = taught(alone(n, law) for n in (200, 230, 248, 322, 364, 410))
    assert estimator.ready
    for n in (*range(200, 249), *range(322, 411)):
        assert_exact(estimator.predict(size(8, n)), alone(n, law))
    for n in range(249, 322):
        profile, truth = told(estimator.predict(size(8, n))), alone(n, law).profile
        for option in Option:
            assert 1 <= peak(profile, [option]) / peak(truth, [option]) < 1.02


@pytest.mark.parametrize("smaller", [(4, 128), (4, 200), (1, 300)])
def test_one_smaller_batch_leaves_the_bounds_of_all_others_as_close(
    smaller: tuple[int, int],
) -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        batch, length = dims
        return [1000 + batch * (4000 * min(length, 256) + 1000 * length)]

    lengths = (120, 160, 200, 230, 290, 322, 364, 410)
    full = [seen(8, n, law=law, pattern=ALONE) for n in lengths]
    estimator = taught([*full, seen(*smaller, law=law, pattern=ALONE)], ALONE)
    alone = taught(full, ALONE)
    for n in range(120, 411, 5):
        predicted, closest = estimator.predict(size(8, n)), alone.predict(size(8, n))
        assert state_at(estimator, n) is state_at(alone, n)
        truth = seen(8, n, law=law, pattern=ALONE)
        for option in Option:
            share = peak(told(predicted), [option]) / peak(told(closest), [option])
            assert share == pytest.approx(1, abs=1e-3)
            assert peak(told(predicted), [option]) >= 0.999 * peak(truth.profile, [option])


def in_jumps(step: int) -> Law:
    """Padded to multiples of a step."""

    def law(dims: tuple[int, ...]) -> list[int]:
        return [1000 + 900 * -(-dims[1] // step) * step]

    return law


def test_a_quantity_that_jumps_is_trusted_where_it_does_not_jump() -> None:
    law = in_jumps(97)  # not a size that networks pad to
    lengths = [*range(20, 400, 13)]
    estimator = taught(alone(n, law) for n in lengths)
    assert not estimator.noisy
    trusted = [n for n in range(20, 397) if state_at(estimator, n) is State.TRUSTED]
    for n in trusted:
        assert_no_lower(estimator.predict(size(8, n)), alone(n, law), slack=600)
    assert len(trusted) > 200
    jumps = [n for n in (98, 195, 292) if n not in lengths]
    assert not {*trusted} & {*jumps}


def uneven(length: int) -> StepObservation:
    """Between 290 and 350, every other size takes a tenth more."""

    def law(dims: tuple[int, ...]) -> list[int]:
        n = dims[1]
        return [1000 * n * (10 + (290 < n < 350 and n % 4 == 0))]

    return alone(length, law)


def test_only_sizes_next_to_unpredictable_observations_are_not_trusted() -> None:
    estimator = taught(map(uneven, range(100, 401, 10)))
    assert state_at(estimator, 155) is State.TRUSTED
    assert state_at(estimator, 385) is State.TRUSTED
    for length in (305, 315, 325):
        assert state_at(estimator, length) is State.LEARNING


def scattering(length: int) -> StepObservation:
    """Memory depends a little on more than the size."""
    share = random.Random(length).uniform(0.995, 1.005)

    def law(dims: tuple[int, ...]) -> list[int]:
        return [round(100_000 * dims[1] * share)]

    return alone(length, law)


def test_deviations_of_less_than_a_hundredth_are_covered_by_a_margin() -> None:
    estimator = taught(map(scattering, range(100, 401, 20)))
    trusted = [n for n in range(100, 401) if state_at(estimator, n) is State.TRUSTED]
    assert len(trusted) > 150
    errors = []
    for n in trusted:
        predicted = told(estimator.predict(size(8, n)))
        errors.append(peak(predicted, [Option.KEEP]) / peak(scattering(n).profile, [Option.KEEP]))
    assert min(errors) > 0.99
    assert sum(errors) / len(errors) < 1.02


@pytest.mark.parametrize(
    ("length", "state"),
    [
        (199, State.TRUSTED),
        (196, State.LEARNING),
        (403, State.TRUSTED),
        (406, State.LEARNING),
    ],
)
def test_sizes_up_to_one_percent_outside_the_observed_range_are_trusted(
    length: int, state: State
) -> None:
    estimator = taught(seen(8, n) for n in (200, 250, 300, 350, 400))
    assert state_at(estimator, length) is state
    predicted, truth = told(estimator.predict(size(8, length))), seen(8, length).profile
    for option in Option:
        assert 1 <= peak(predicted, [option] * 3) / peak(truth, [option] * 3) < 1.01
