"""Predictions are exact where bytes are polynomials of the size, and never too low elsewhere."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from chains import steady
from mimose.costs.input_size import InputSize
from mimose.costs.observations import StepObservation
from mimose.costs.options import Option
from mimose.costs.timeline import Profile, peak
from mimose.estimation.cost_model import CostModel
from mimose.estimation.estimator import Estimator
from mimose.estimation.prediction import Prediction, State
from mimose.estimation.reliability import Reliability
from observed import (
    PATTERN,
    Law,
    amounts,
    assert_exact,
    assert_no_lower,
    in_length,
    pattern_of,
    seen,
    size,
    taught,
    told,
)

LAYOUT = (("0", 2),)
KEPT, AGAIN = [Option.KEEP] * 3, [Option.RECOMPUTE] * 3


def in_two_lengths(dims: tuple[int, ...]) -> list[int]:
    b, s, t = dims
    return [1000, b * 10, b * s * 4, b * t * 3, b * s * s, b * s * t, b * t * t]


def with_backwards(observation: StepObservation, *, movable: bool = True) -> StepObservation:
    """The same, with backwards that take twice as long as recomputes."""
    runs = [
        run._replace(backward_nanoseconds=2 * run.nanoseconds, input_movable=movable)
        for run in observation.runs
    ]
    return observation.with_runs(runs)


# Ready, and exact


def test_fixed_batch_is_ready_after_four_lengths() -> None:
    estimator = Estimator(PATTERN)
    readiness = []
    for length in (128, 64, 64, 200, 300):
        estimator.learn(seen(8, length))
        readiness.append(estimator.ready)
    assert readiness == [False, False, False, False, True]
    assert len(estimator) == 4


def test_error_is_unknown_without_a_fit_and_next_to_nothing_for_polynomials() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200))
    assert estimator.error is None
    estimator.learn(seen(8, 300))
    assert estimator.error == pytest.approx(0, abs=1e-5)


@steady
@given(st.lists(st.integers(16, 512), min_size=4, max_size=9, unique=True))
def test_unseen_lengths_in_range_are_predicted_exactly(lengths: list[int]) -> None:
    assume(max(lengths) - min(lengths) >= 32)
    estimator = taught(seen(8, length) for length in lengths)
    for length in range(min(lengths), max(lengths), 7):
        assert_exact(estimator.predict(size(8, length)), seen(8, length))


def test_lengths_below_the_range_are_predicted_exactly() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    for length in (1, 10, 50):
        assert_exact(estimator.predict(size(8, length)), seen(8, length))


def test_batch_and_length_are_distinguished() -> None:
    some = [(8, 100), (4, 60), (6, 300), (2, 200), (8, 150)]
    estimator = taught(seen(*dims) for dims in some)
    assert estimator.ready
    for dims in itertools.product((1, 3, 5, 8), (40, 99, 250, 300)):
        assert_exact(estimator.predict(size(*dims)), seen(*dims))


def test_batch_alone_is_ready_after_three_sizes() -> None:
    estimator = taught(seen(batch, 128) for batch in (2, 5))
    assert not estimator.ready
    estimator.learn(seen(8, 128))
    assert estimator.ready
    for batch in (1, 3, 7):
        assert_exact(estimator.predict(size(batch, 128)), seen(batch, 128))


def test_batch_source_and_target_are_distinguished() -> None:
    some = [(4, 10, 90), (4, 70, 20), (8, 50, 50), (2, 90, 60), (6, 30, 30), (8, 20, 80)]
    some += [(3, 60, 10), (5, 80, 90), (7, 15, 40)]
    estimator = taught(seen(*dims, law=in_two_lengths) for dims in some)
    assert estimator.ready
    for dims in ((5, 33, 44), (8, 90, 90), (1, 10, 90)):
        truth = seen(*dims, law=in_two_lengths)
        assert_exact(estimator.predict(size(*dims)), truth)


def test_dimensions_that_are_always_equal_count_as_one() -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        return in_length((dims[0], dims[1]))

    estimator = taught(seen(8, n, 8, 1, n, n, law=law) for n in (64, 128, 200, 300))
    assert estimator.ready
    assert_exact(estimator.predict(size(8, 99, 8, 1, 99, 99)), seen(8, 99, 8, 1, 99, 99, law=law))


@pytest.mark.parametrize("other", [lambda n: n + 20, lambda n: 2 * n], ids=["offset", "multiple"])
def test_dimensions_that_always_vary_together_count_as_one(other: Callable[[int], int]) -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        return in_length((dims[0], dims[1]))

    lengths = (64, 100, 128, 200, 230, 256, 270, 300)
    estimator = taught(seen(8, n, 8, other(n), law=law) for n in lengths)
    assert estimator.ready
    truth = seen(8, 99, 8, other(99), law=law)
    assert_exact(estimator.predict(truth.size), truth)


def test_length_may_come_before_the_batch() -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        return in_length((dims[1], dims[0]))

    estimator = taught(seen(n, 8, law=law) for n in (20, 64, 128, 200, 256, 300))
    assert estimator.ready
    assert_exact(estimator.predict(size(99, 8)), seen(99, 8, law=law))


def test_dimensions_that_were_equal_until_now_are_covered_by_the_larger() -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        return in_length((8, dims[1]))

    estimator = taught(seen(8, n, n, law=law) for n in (64, 128, 200, 300))
    predicted = told(estimator.predict(size(8, 70, 150)))
    assert amounts(predicted) == pytest.approx(amounts(seen(8, 150, 150, law=law).profile), abs=1)


# Outside the observed range


def test_last_smaller_batch_is_covered_by_the_usual_one() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    predicted, truth = told(estimator.predict(size(3, 150))), seen(3, 150).profile
    for choices in (KEPT, AGAIN, [Option.RECOMPUTE, Option.KEEP, Option.RECOMPUTE]):
        assert peak(predicted, choices) >= peak(truth, choices)
    assert amounts(predicted) == pytest.approx(amounts(seen(8, 150).profile), abs=1)


def test_last_smaller_batch_is_predicted_exactly_once_seen() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    estimator.learn(seen(3, 90))
    assert_exact(estimator.predict(size(3, 150)), seen(3, 150))
    assert_exact(estimator.predict(size(8, 150)), seen(8, 150))


def test_dimension_that_never_varied_is_not_predicted_to_grow() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    assert estimator.predict(size(9, 64)) is None
    assert not estimator.covers(size(9, 64))


def test_sizes_a_tenth_beyond_the_range_are_predicted_with_a_margin_by_an_exact_fit() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    for length in range(301, 331):
        predicted, truth = told(estimator.predict(size(8, length))), seen(8, length).profile
        assert all(a > b for a, b in zip(amounts(predicted), amounts(truth), strict=True))
        assert not estimator.covers(size(8, length))


def test_sizes_further_beyond_the_range_are_not_predicted() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    assert estimator.predict(size(8, 331)) is None


def test_memory_that_grows_with_the_fourth_power_is_predicted_a_little_beyond_the_range() -> None:
    def in_side(dims: tuple[int, ...]) -> list[int]:
        batch, side = dims
        return [batch * side**4 // 16]

    estimator = taught(seen(2, side, law=in_side) for side in (56, 58, 60, 64))
    for side in range(65, 71):
        truth = seen(2, side, law=in_side).profile
        peaks = [peak(p, KEPT) for p in (told(estimator.predict(size(2, side))), truth)]
        assert peaks[0] >= 0.99 * peaks[1]


def test_another_layout_is_not_predicted() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    assert estimator.predict(InputSize((("ids", 2),), (8, 128))) is None


def test_costs_that_are_no_polynomial_are_not_ready() -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        return [10_000 if dims[1] % 3 else 1_000_000]

    assert not taught(seen(8, n, law=law) for n in (64, 129, 200, 300, 310)).ready


coefficients = st.tuples(st.integers(0, 10**6), st.integers(0, 4000), st.integers(0, 20))


ALONE = PATTERN[:1]
"""One run, so that each quantity is a part of the peak that is large enough to show its kinks."""


def kinked(one: tuple[int, ...], other: tuple[int, ...]) -> Law:
    """Two moments compete for a peak: the larger quadratic of two."""

    def law(dims: tuple[int, ...]) -> list[int]:
        n = dims[1]
        return [max(a + b * n + c * n * n for a, b, c in (one, other))]

    return law


def higher_of(one: tuple[int, ...], other: tuple[int, ...], n: int) -> tuple[int, ...]:
    return max(one, other, key=lambda parabola: sum(c * n**k for k, c in enumerate(parabola)))


@settings(steady, max_examples=150)
@given(
    coefficients,
    coefficients,
    st.lists(st.integers(16, 512), min_size=4, max_size=8, unique=True),
)
@example((38514, 2867, 19), (859429, 2179, 2), [70, 152, 301, 384])  # fits at all four by chance
def test_peaks_with_kinks_are_not_predicted_too_low(
    one: tuple[int, ...], other: tuple[int, ...], lengths: list[int]
) -> None:
    law = kinked(one, other)
    estimator = taught(seen(8, n, law=law, pattern=ALONE) for n in lengths)
    assume(estimator.ready)
    between = range(min(lengths), max(lengths) + 1)
    # A parabola that is not the higher one at any observed size cannot be known.
    assume(
        {higher_of(one, other, n) for n in between} == {higher_of(one, other, n) for n in lengths}
    )
    for n in between:
        truth = seen(8, n, law=law, pattern=ALONE)
        # Deviations of less than 0.1 % of the peak are not distinguished from a polynomial.
        slack = peak(truth.profile, [Option.KEEP]) // 1000
        assert_no_lower(estimator.predict(size(8, n)), truth, slack)


@pytest.mark.parametrize("lengths", [range(100, 401, 3), range(1, 100, 9)], ids=["in", "below"])
def test_kinks_that_a_fit_alone_would_cut_off_are_not_predicted_too_low(lengths: range) -> None:
    law = kinked((135_000, 3976, 4), (402_000, 1323, 10))
    estimator = taught(seen(8, n, law=law, pattern=ALONE) for n in range(100, 401, 50))
    assert estimator.ready
    for n in lengths:
        assert_no_lower(estimator.predict(size(8, n)), seen(8, n, law=law, pattern=ALONE))


@pytest.mark.parametrize("lengths", [range(100, 401, 3), range(1, 100, 9)], ids=["in", "below"])
def test_peaks_of_several_runs_with_kinks_are_not_predicted_too_low(lengths: range) -> None:
    law = kinked((135_000, 3976, 4), (402_000, 1323, 10))
    estimator = taught(seen(8, n, law=law) for n in range(100, 401, 50))
    for n in lengths:
        predicted, truth = told(estimator.predict(size(8, n))), seen(8, n, law=law).profile
        for choices in itertools.product(Option, repeat=3):
            assert peak(predicted, choices) >= 0.999 * peak(truth, choices)


# Observed sizes


def test_an_observed_size_is_predicted_as_observed() -> None:
    once = seen(8, 128, seconds=(1e-3, 2e-3, 3e-3))
    assert told(taught([once]).predict(once.size)) == once.profile


def test_the_newer_observation_of_a_size_counts() -> None:
    estimator = taught([seen(8, 128), seen(8, 128, change=77)])
    assert told(estimator.predict(size(8, 128))) == seen(8, 128, change=77).profile
    assert (len(estimator), estimator.version) == (1, 2)


def test_bound_is_the_smallest_observed_size_that_is_larger() -> None:
    estimator = taught(seen(*dims) for dims in ((8, 300), (8, 128), (2, 400)))
    for asked, larger in [((8, 100), (8, 128)), ((8, 128), (8, 128)), ((8, 129), (8, 300)),
                          ((1, 399), (2, 400))]:  # fmt: skip
        bound = estimator.bound(size(*asked))
        assert told(bound) == seen(*larger).profile
        assert bound is not None
        assert bound.bound_of == size(*larger)
        assert bound.state is State.LEARNING


def test_a_size_larger_than_all_observed_has_no_bound() -> None:
    estimator = taught([seen(8, 128), seen(4, 300)])
    assert estimator.bound(size(8, 129)) is None
    assert Estimator(PATTERN).bound(size(8, 129)) is None


def test_between_sizes_seen_is_covered_and_beyond_is_not() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    assert estimator.covers(size(8, 300))
    assert estimator.covers(size(3, 150))
    assert not estimator.covers(size(8, 301))


def test_at_most_64_sizes_are_remembered_and_the_range_with_them() -> None:
    estimator = taught(seen(8, 100 + (37 * n) % 101) for n in range(101))
    assert len(estimator) == 64
    assert told(estimator.predict(size(8, 100))) == seen(8, 100).profile
    assert told(estimator.predict(size(8, 200))) == seen(8, 200).profile
    assert_exact(estimator.predict(size(8, 177)), seen(8, 177))


def test_of_many_sizes_in_two_dimensions_the_longest_is_not_dropped() -> None:
    # Batches of about a thousand tokens: the longest is in the smallest batch.
    draw = random.Random(5)
    lengths = [draw.randint(50, 1000) for _ in range(120)]
    estimator = taught(seen(2000 // n, n) for n in lengths)
    assert len(estimator) == 64
    assert estimator.covers(size(2, max(lengths)))
    assert estimator.covers(size(2000 // min(lengths), min(lengths)))


def test_fixed_runs_stay_fixed_in_predictions() -> None:
    fixed = (False, True, False)
    estimator = taught(seen(8, n, fixed=fixed) for n in (64, 128, 200, 300))
    predicted = told(estimator.predict(size(8, 99)))
    assert tuple(run.fixed for run in predicted.runs) == fixed


# Times


def times(prediction: Prediction | None) -> list[int]:
    return [run.nanoseconds for run in told(prediction).runs]


def test_time_is_a_line_in_the_bytes_that_a_run_saves() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    assert times(estimator.predict(size(8, 150))) == pytest.approx(
        [run.nanoseconds for run in seen(8, 150).runs], rel=1e-6
    )


def test_blocks_that_save_the_same_share_the_median_time() -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        return [0]

    step = seen(8, 128, law=law, change=5000, seconds=(1e-3, 9e-3, 2e-3))
    assert times(taught([step]).predict(step.size)) == [2_000_000] * 3


def test_blocks_that_save_differently_have_times_of_their_own() -> None:
    step = seen(8, 128, seconds=(1e-3, 9e-3, 2e-3))
    assert len({run.saved for run in step.runs}) == 3
    assert times(taught([step]).predict(step.size)) == [1_000_000, 9_000_000, 2_000_000]


def test_time_never_falls_as_bytes_grow() -> None:
    steps = [(64, 9e-3), (128, 5e-3), (200, 3e-3), (300, 1e-3)]
    estimator = taught(seen(8, length, seconds=(t,) * 3) for length, t in steps)
    assert times(estimator.predict(size(8, 100))) == times(estimator.predict(size(8, 250)))
    assert times(estimator.predict(size(8, 100))) == pytest.approx([4_500_000] * 3)


# The cost model

TWICE = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1))


def knowing(*observations: StepObservation) -> CostModel:
    cost_model = CostModel()
    for observation in observations:
        cost_model.learn(observation)
    return cost_model


def ready_knowledge() -> CostModel:
    return knowing(*(seen(8, length) for length in (64, 128, 200, 300)))


def test_an_unknown_layout_is_not_predicted() -> None:
    cost_model = knowing(seen(8, 128))
    other = InputSize((("ids", 2),), (8, 64))
    assert cost_model.predict(other) is None
    assert cost_model.for_planning(other) is None


@pytest.mark.parametrize("order", [1, -1])
def test_the_longest_pattern_is_planned_for(order: int) -> None:
    once, twice = seen(8, 128), seen(8, 128, pattern=TWICE)
    cost_model = knowing(*[once, twice, once][::order])
    assert pattern_of(cost_model.predict(size(8, 128))) == TWICE
    assert told(cost_model.predict(size(8, 128))) == twice.profile
    assert told(cost_model.predict(size(8, 100))) == twice.profile


def test_layouts_are_predicted_separately() -> None:
    ids = (("ids", 2),)
    cost_model = knowing(seen(8, 128), seen(8, 128, layout=ids, change=77))
    assert told(cost_model.predict(size(8, 128))) == seen(8, 128).profile
    predicted = told(cost_model.predict(InputSize(ids, (8, 128))))
    assert predicted == seen(8, 128, layout=ids, change=77).profile


def test_readiness_and_error_are_those_of_the_estimators() -> None:
    cost_model = knowing(*(seen(8, length) for length in (64, 128, 200)))
    assert not cost_model.ready
    assert cost_model.error is None
    cost_model.learn(seen(8, 300))
    assert cost_model.ready
    assert cost_model.error == pytest.approx(0, abs=1e-5)


def bent(batch: int, length: int) -> StepObservation:
    """Kinks in two dimensions: one quantity is 0 for a batch of one, the tail below some size."""
    whole = seen(batch, length)
    runs = [r._replace(droppable_input=r.droppable_input // 40 * (batch > 1)) for r in whole.runs]
    tail = max(0, 300 * (batch * length - 150))
    return replace(whole, profile=replace(whole.with_runs(runs).profile, tail=tail))


def test_kinks_in_two_dimensions_are_bounded_closely() -> None:
    sizes = [(1, 40), (6, 64), (2, 20), (4, 50), (3, 33), (5, 16), (1, 60), (6, 12), (2, 55)]
    estimator = taught(bent(*each) for each in sizes)
    for batch, length in [(2, 30), (3, 50), (5, 40), (4, 20)]:
        profile, truth = told(estimator.predict(size(batch, length))), bent(batch, length).profile
        assert 0.9 * truth.tail <= profile.tail <= 6 * 64 * 300
        for run, real in zip(profile.runs, truth.runs, strict=True):
            assert run.droppable_input <= real.droppable_input + 0.01 * real.saved
            assert run.saved == pytest.approx(real.saved, rel=0.01)


def falling(length: int) -> StepObservation:
    """A tail that falls with the length: more memory was in use before the blocks."""
    whole = seen(8, length)
    return replace(whole, profile=replace(whole.profile, tail=10**7 - 1000 * length))


@pytest.mark.parametrize("length", [48, 160])
def test_a_quantity_that_falls_with_the_size_is_predicted(length: int) -> None:
    estimator = taught(map(falling, (64, 96, 128, 200, 256)))
    profile = told(estimator.predict(size(8, length)))
    assert profile.tail >= 10**7 - 1000 * length


def test_a_bound_is_no_lower_where_something_falls_with_the_size() -> None:
    estimator = taught(map(falling, (64, 256)))
    bound, larger = told(estimator.bound(size(8, 160))), falling(256).profile
    assert bound.tail == 10**7 - 64_000
    assert [run.saved for run in bound.runs] == [run.saved for run in larger.runs]


def gradients(cost_model: CostModel, missing_bytes: int) -> tuple[tuple[int, ...], int]:
    """Gradients that a step will allocate before each run's backward, and in all."""
    conditions = cost_model.conditions(PATTERN, missing_bytes)
    return conditions.gradients_allocated, conditions.all_gradients_allocated


def test_no_gradients_are_allocated_if_none_is_missing() -> None:
    cost_model = knowing(seen(8, 128, allocated=(300, 200, 100)))
    assert gradients(cost_model, 0) == ((0, 0, 0), 0)


def test_unknown_gradients_are_assumed_to_be_allocated_at_once() -> None:
    cost_model = knowing(seen(8, 128))
    assert gradients(cost_model, 400) == ((400, 400, 400), 400)


def test_gradients_are_allocated_as_observed_but_no_more_than_are_missing() -> None:
    cost_model = knowing(seen(8, 128, allocated=(300, 200, 100)), seen(8, 64))
    assert gradients(cost_model, 400) == ((300, 200, 100), 400)
    assert gradients(cost_model, 150) == ((150, 150, 100), 150)


def test_gradients_of_parameters_that_no_loss_reaches_are_never_allocated() -> None:
    cost_model = knowing(seen(8, 128, allocated=(300, 200, 100), in_all=320))
    assert gradients(cost_model, 400) == ((300, 200, 100), 320)
    cost_model.learn(seen(8, 64, in_all=0))  # a step that adds to most gradients
    assert gradients(cost_model, 400) == ((300, 200, 100), 320)
    again = CostModel.from_plain(cost_model.to_plain())
    assert gradients(again, 400) == ((300, 200, 100), 320)


def test_gradients_in_older_files_are_read() -> None:
    plain = knowing(seen(8, 128, allocated=(300, 200, 100), in_all=320)).to_plain()
    del plain["observations"][0]["all_gradients"]
    plain["born"] = plain.pop("gradients")
    plain["born"][0][1].pop()
    assert gradients(CostModel.from_plain(plain), 400) == ((300, 200, 100), 400)


def test_steps_that_find_some_gradients_are_known_from_steps_that_allocate_all() -> None:
    """Observed costs exclude the gradients of the step, so both kinds give the same costs."""
    cost_model = knowing(
        *(seen(8, n, allocated=(300, 200, 100), in_all=320) for n in (64, 200)),
        *(seen(8, n, in_all=0) for n in (128, 300)),
    )
    prediction = cost_model.predict(size(8, 150))
    assert_exact(prediction, seen(8, 150))
    assert prediction is not None
    assert prediction.trusted
    allocating = told(prediction).in_step(cost_model.conditions(PATTERN, 400))
    entries = zip(allocating.runs, told(prediction).runs, strict=True)
    assert [a.backward_entry - b.backward_entry for a, b in entries] == [300, 200, 100]


LENGTHS = (64, 128, 200, 300)


@pytest.mark.parametrize("known", [True, False])
def test_steps_that_allocate_and_steps_that_add_to_gradients_stand_in_for_each_other(
    known: bool,
) -> None:
    """Their predictions are not trusted, and are used for a few planned steps only."""
    cost_model = knowing(*(seen(8, n, allocates=known) for n in LENGTHS))
    cost_model.allocates = known
    assert state_of(cost_model, 8, 150) is State.TRUSTED
    cost_model.allocates = not known
    assert_exact(cost_model.for_planning(size(8, 150)), seen(8, 150))
    assert pattern_of(cost_model.for_planning(size(8, 150))) == PATTERN
    for length in (128, 150):
        assert state_of(cost_model, 8, length) is State.LEARNING
    for _ in range(3):
        assert not cost_model.worth_observing(size(8, 150))
        assert cost_model.worth_observing(size(8, 20))  # not even the other kind is trusted there
        cost_model.note_planned(size(8, 150))
    assert cost_model.worth_observing(size(8, 150))
    cost_model.allocates = known
    assert state_of(cost_model, 8, 150) is State.TRUSTED
    assert not cost_model.worth_observing(size(8, 150))


def test_steps_predicted_by_their_own_kind_do_not_count_as_stood_in_for() -> None:
    cost_model = ready_knowledge()
    for _ in range(3):
        cost_model.note_planned(size(8, 150))
    cost_model.allocates = False
    assert not cost_model.worth_observing(size(8, 150))


@pytest.mark.parametrize("first", [True, False])
def test_steps_that_allocate_and_steps_that_add_to_gradients_are_separate(first: bool) -> None:
    cost_model = knowing(
        *(seen(8, n, allocates=first) for n in LENGTHS),
        *(seen(8, n, allocates=not first, change=10**6) for n in LENGTHS),
    )
    for model in (cost_model, CostModel.from_plain(cost_model.to_plain())):
        for allocates, change in ((first, 0), (not first, 10**6)):
            model.allocates = allocates
            prediction = model.predict(size(8, 150))
            assert_exact(prediction, seen(8, 150, change=change))
            assert prediction is not None
            assert prediction.trusted


def test_sizes_below_the_observed_range_in_one_dimension_are_not_trusted() -> None:
    seen_sizes = [(2, 20), (3, 30), (4, 60), (2, 60), (4, 30), (3, 45), (2, 50)]
    cost_model = knowing(*(seen(*dims) for dims in seen_sizes))
    assert cost_model.ready

    def trusted(*dims: int) -> bool:
        prediction = cost_model.for_planning(size(*dims))
        return prediction is not None and prediction.trusted

    assert all(trusted(*dims) for dims in ((2, 20), (3, 40), (4, 25)))
    assert not any(trusted(*dims) for dims in ((1, 40), (3, 19), (5, 30)))
    cost_model = ready_knowledge()
    assert trusted(8, 64)
    for length in (63, 10):
        assert state_of(cost_model, 8, length) is State.LEARNING
        assert not trusted(8, length)
        assert not cost_model.worth_observing(size(8, length))  # the fit predicts them well enough


def test_sizes_near_one_line_do_not_lead_to_a_wrong_shape() -> None:
    """Sources and targets of nearly the same ratio, in one fixed batch."""

    def law(dims: Sequence[int]) -> list[int]:
        _, source, _ = dims
        return [100, 9600 * source, 60 * source * source]

    pairs = [(40, 28), (16, 12), (32, 24), (56, 40), (44, 32), (64, 48), (48, 36), (60, 44)]
    for count in range(4, len(pairs) + 1):
        estimator = taught(seen(4, *pair, law=law) for pair in pairs[:count])
        for pair in ((36, 24), (24, 16), (20, 12), (52, 36)):
            prediction = estimator.predict(size(4, *pair))
            real = seen(4, *pair, law=law).profile
            for choices in (KEPT, AGAIN):
                least = 0.998 * peak(real, choices)
                assert prediction is None or peak(prediction.profile, choices) >= least
    assert estimator.ready


@pytest.mark.parametrize("beyond", [size(8, 301), size(9, 64), InputSize((("ids", 2),), (8, 64))])
def test_peaks_outside_the_observed_range_do_not_count(beyond: InputSize) -> None:
    cost_model = ready_knowledge()
    cost_model.peaked(beyond, 1000, 2000)
    assert cost_model.reliability.uncertainty == 0
    cost_model.peaked(size(8, 150), 1000, 1010)
    assert cost_model.reliability.uncertainty == pytest.approx(0.01)


def test_steps_are_worth_observing_until_the_model_is_ready() -> None:
    cost_model = knowing(*(seen(8, length) for length in (64, 128, 200)))
    assert cost_model.worth_observing(size(8, 100))
    cost_model.learn(seen(8, 300))
    assert not cost_model.worth_observing(size(8, 100))


def test_steps_are_not_worth_observing_for_ever() -> None:
    cost_model = knowing(*[seen(8, 128)] * 11)
    assert cost_model.worth_observing(size(8, 100))
    cost_model.learn(seen(8, 128))
    assert not cost_model.worth_observing(size(8, 100))


def test_steps_of_each_layout_are_worth_observing() -> None:
    cost_model = ready_knowledge()
    other = InputSize((("ids", 2),), (8, 128))
    assert cost_model.worth_observing(other)
    cost_model.learn(seen(8, 300, layout=other.layout))
    assert cost_model.worth_observing(other)


@pytest.mark.parametrize("length", [20, 114, 300, 321])
def test_sizes_seen_close_together_do_not_make_the_fit_bend_away(length: int) -> None:
    noise = {316: 3, 317: -2, 318: 4, 320: 1, 322: 0}
    estimator = taught(seen(8, n, change=1000 * off) for n, off in noise.items())
    prediction = estimator.predict(size(8, length))
    largest = seen(8, 322, change=4000).profile
    if prediction is not None:
        limits = zip(amounts(prediction.profile), amounts(largest), strict=True)
        assert all(amount <= limit * 1.02 for amount, limit in limits)


def test_predictions_have_a_new_version_once_they_may_have_changed() -> None:
    cost_model = ready_knowledge()
    versions = [cost_model.version]
    cost_model.predict(size(8, 150))
    cost_model.peaked(size(8, 150), 1000, 1001)
    assert cost_model.version == versions[-1]
    cost_model.learn(seen(8, 150, change=10_000))
    versions.append(cost_model.version)
    cost_model.take_times(seen(8, 150, seconds=(1.0, 2.0, 4.0)))
    versions.append(cost_model.version)
    assert versions == sorted(set(versions))
    assert cost_model.observed == 5  # late times are not another observation


def test_an_observation_as_predicted_leaves_the_version_as_it_is() -> None:
    cost_model = ready_knowledge()
    version = cost_model.version
    cost_model.learn(seen(8, 150))
    cost_model.take_times(seen(8, 150, seconds=(1.0, 2.0, 4.0)))
    assert cost_model.version == version


def test_more_gradients_than_were_known_change_the_version() -> None:
    """Whether an observation has them, or a step that is never learned from."""
    cost_model = ready_knowledge()
    versions = [cost_model.version]
    cost_model.learn(seen(8, 160, allocated=(10**9,) * len(PATTERN)))
    versions.append(cost_model.version)
    cost_model.note_gradients(PATTERN, (2 * 10**9,) * len(PATTERN), None)
    versions.append(cost_model.version)
    assert versions == sorted(set(versions))
    cost_model.note_gradients(PATTERN, (10**9,) * len(PATTERN), None)
    assert cost_model.version == versions[-1]


def test_after_a_doubtful_peak_even_an_observation_as_predicted_changes_the_version() -> None:
    """Peaks with gradients may be far off where those without are right."""
    cost_model = ready_knowledge()
    version = cost_model.version
    cost_model.peaked(size(8, 150), 1_000_000, 1_100_000)
    cost_model.learn(seen(8, 150))
    assert cost_model.version > version


@pytest.mark.parametrize("flag", ["fixed", "input_movable"])
def test_an_observation_of_runs_with_other_options_changes_the_version(flag: str) -> None:
    """Even if its bytes are as predicted: plans made before may choose what is not possible."""
    cost_model = ready_knowledge()
    version = cost_model.version
    observation = seen(8, 150)
    other = [run._replace(**{flag: not getattr(run, flag)}) for run in observation.runs]
    cost_model.learn(observation.with_runs(other))
    assert cost_model.version > version


def test_an_observation_without_times_gets_those_that_are_predicted() -> None:
    cost_model = ready_knowledge()
    untimed = seen(8, 150, seconds=(0.0,) * len(PATTERN))
    prediction = cost_model.predict(size(8, 150))
    assert prediction is not None
    expected = [run.nanoseconds for run in prediction.profile.runs]
    assert [run.nanoseconds for run in cost_model.with_predicted_times(untimed).runs] == expected
    other = seen(8, 150, layout=(("ids", 2),), seconds=(0.0,) * len(PATTERN))
    assert cost_model.with_predicted_times(other) is other


def test_runs_that_stop_having_a_backward_are_planned_anew() -> None:
    cost_model = ready_knowledge()
    version = cost_model.version
    for _ in range(20):
        cost_model.note_without_backward(frozenset({PATTERN[-1]}))
    assert cost_model.unused
    assert cost_model.version == version + 1


def test_late_times_count_in_predictions_of_other_sizes() -> None:
    cost_model = ready_knowledge()
    for length in (64, 128, 200, 300):
        cost_model.take_times(seen(8, length, seconds=(1.0, 2.0, 4.0)))
    assert times(cost_model.predict(size(8, 150))) == pytest.approx([1e9, 2e9, 4e9])


def test_only_sizes_larger_than_all_observed_exceed_them() -> None:
    cost_model = ready_knowledge()
    assert not cost_model.exceeds_observed(size(8, 300))
    assert not cost_model.exceeds_observed(size(3, 150))
    assert cost_model.exceeds_observed(size(8, 301))
    assert cost_model.exceeds_observed(size(9, 64))
    cost_model.learn(seen(8, 301))
    assert not cost_model.exceeds_observed(size(8, 301))


# The state of predictions


def state_of(estimator: Estimator | CostModel, *dims: int) -> State | None:
    prediction = estimator.predict(size(*dims))
    return None if prediction is None else prediction.state


def test_observed_sizes_and_sizes_between_them_are_trusted() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    assert state_of(estimator, 8, 128) is State.TRUSTED
    assert state_of(estimator, 8, 150) is State.TRUSTED


def test_sizes_a_little_beyond_those_seen_are_not_trusted() -> None:
    estimator = taught(seen(8, length) for length in (64, 128, 200, 300))
    assert state_of(estimator, 8, 310) is State.LEARNING


def bumpy(length: int) -> StepObservation:
    """Every third length takes a tenth more."""

    def law(dims: tuple[int, ...]) -> list[int]:
        return [10_000 * dims[1] * (10 + (dims[1] % 3 == 0))]

    return seen(8, length, law=law)


def test_between_sizes_without_a_fit_predictions_are_upper_bounds() -> None:
    estimator = taught(map(bumpy, (64, 129, 200, 256, 300)))
    prediction = estimator.predict(size(8, 150))
    assert prediction is not None
    assert prediction.state is State.SUSPECT
    assert not estimator.noisy
    assert peak(prediction.profile, KEPT) >= peak(bumpy(150).profile, KEPT)
    assert state_of(estimator, 8, 129) is State.TRUSTED  # it was observed


def test_many_sizes_without_a_fit_have_suspect_predictions_that_are_not_too_low() -> None:
    lengths = range(60, 300, 14)
    estimator = taught(map(bumpy, lengths))
    assert estimator.noisy
    for length in (*lengths, 99, 150, 151, 240):
        prediction = estimator.predict(size(8, length))
        assert prediction is not None
        assert prediction.state is State.SUSPECT
        assert peak(prediction.profile, KEPT) >= 0.999 * peak(bumpy(length).profile, KEPT)


def test_a_guess_from_a_smaller_size_is_generous_and_not_trusted() -> None:
    cost_model = knowing(seen(8, 100))
    assert cost_model.predict(size(8, 150)) is None
    guess = cost_model.for_planning(size(8, 150))
    assert guess is not None
    assert guess.state is State.UNKNOWN
    assert guess.uncertainty > 0
    real = seen(8, 150).profile
    for choices in (KEPT, AGAIN):
        assert peak(real, choices) <= peak(guess.profile, choices) <= 2.25 * peak(real, choices)


@pytest.mark.parametrize("constant", [0, 1])
def test_a_dimension_that_stays_the_same_does_not_prevent_a_guess(constant: int) -> None:
    def with_constant(*dims: int) -> InputSize:
        return size(*dims, constant)

    observation = seen(8, 100)
    profile = replace(observation.profile, size=with_constant(8, 100))
    estimator = taught([replace(observation, profile=profile)])
    assert estimator.guess(with_constant(8, 110)) is not None
    assert estimator.guess(size(8, 110, constant + 5)) is None


def test_a_size_far_beyond_those_observed_has_no_guess() -> None:
    assert knowing(seen(8, 100)).for_planning(size(8, 201)) is None


# Provisional observations


def provisional(*dims: int, **options: Any) -> StepObservation:
    return replace(seen(*dims, **options), provisional=True)


def test_a_provisional_observation_is_a_prediction_but_not_trusted() -> None:
    estimator = taught([provisional(8, 128)])
    prediction = estimator.predict(size(8, 128))
    assert told(prediction) == seen(8, 128).profile
    assert prediction is not None
    assert prediction.state is State.LEARNING
    assert prediction.uncertainty > 0
    assert knowing(provisional(8, 128)).worth_observing(size(8, 128))


@pytest.mark.parametrize("length", [128, 64])
def test_a_provisional_observation_is_dropped_when_another_comes(length: int) -> None:
    estimator = taught([provisional(8, 128, change=10**6), seen(8, length)])
    assert [o.provisional for o in estimator.observations] == [False]
    assert told(estimator.predict(size(8, length))) == seen(8, length).profile
    assert state_of(estimator, 8, length) is State.TRUSTED


def test_a_provisional_observation_does_not_replace_a_whole_one() -> None:
    estimator = taught([seen(8, 128), provisional(8, 128, change=10**6), provisional(8, 64)])
    assert told(estimator.predict(size(8, 128))) == seen(8, 128).profile
    assert len(estimator) == 1


def test_a_provisional_observation_does_not_clear_a_doubt() -> None:
    cost_model = knowing(*(seen(8, n) for n in (64, 100, 128, 150, 200)))
    cost_model.peaked(size(8, 120), 1000, 2000)
    assert state_of(cost_model, 8, 120) is State.SUSPECT
    cost_model.learn(provisional(8, 128, change=10**6))
    assert state_of(cost_model, 8, 120) is State.SUSPECT
    cost_model.learn(seen(8, 128))
    assert state_of(cost_model, 8, 120) is State.TRUSTED


def test_a_provisional_observation_is_not_fitted() -> None:
    estimator = taught([provisional(8, 400, change=10**9), *(seen(8, n) for n in (64, 128, 200))])
    assert not estimator.ready
    estimator.learn(seen(8, 300))
    assert_exact(estimator.predict(size(8, 150)), seen(8, 150))


def test_a_provisional_observation_is_provisional_after_loading() -> None:
    again = CostModel.from_plain(knowing(provisional(8, 128)).to_plain())
    assert state_of(again, 8, 128) is State.LEARNING
    again.learn(seen(8, 64))
    assert [o.size for o in again.observations] == [size(8, 64)]


# Surprises


def test_an_under_predicted_peak_increases_the_uncertainty() -> None:
    reliability = Reliability()
    assert reliability.uncertainty == 0
    reliability.peaked(1000, 1010)
    assert reliability.uncertainty == pytest.approx(0.01)
    reliability.peaked(1000, 1020)
    reliability.peaked(1000, 1005)
    assert reliability.uncertainty == pytest.approx(0.02)


@steady
@given(st.lists(st.integers(1, 1000), max_size=80))
def test_an_over_predicted_peak_never_makes_the_uncertainty_negative(real: list[int]) -> None:
    reliability = Reliability()
    for rise in real:
        reliability.peaked(1000, rise)
    assert reliability.uncertainty == 0


def test_an_under_predicted_peak_is_forgotten_after_many_that_were_not() -> None:
    reliability = Reliability()
    reliability.peaked(1000, 1020)
    for _ in range(63):
        reliability.peaked(1000, 990)
    assert reliability.uncertainty == pytest.approx(0.02)
    reliability.peaked(1000, 990)
    assert reliability.uncertainty == 0


def test_a_peak_without_a_predicted_rise_does_not_count() -> None:
    reliability = Reliability()
    reliability.peaked(0, 1000)
    assert reliability.uncertainty == 0
    assert not reliability.suspects(size(8, 128))


def test_a_surprise_makes_predictions_suspect_until_the_next_observation() -> None:
    cost_model = ready_knowledge()
    assert not cost_model.worth_observing(size(8, 150))
    cost_model.surprised()
    for length in (128, 150):
        assert state_of(cost_model, 8, length) is State.SUSPECT
        assert cost_model.worth_observing(size(8, length))
    cost_model.learn(seen(8, 150))
    for length in (128, 150):
        assert state_of(cost_model, 8, length) is State.TRUSTED
        assert not cost_model.worth_observing(size(8, length))


@pytest.mark.parametrize("real", [1040, 960])
def test_a_peak_far_from_its_prediction_is_a_surprise(real: int) -> None:
    cost_model = ready_knowledge()
    cost_model.peaked(size(8, 150), 1000, 1029)
    assert state_of(cost_model, 8, 150) is State.TRUSTED
    cost_model.peaked(size(8, 150), 1000, real)
    assert state_of(cost_model, 8, 150) is State.SUSPECT


@pytest.mark.parametrize("real", [1040, 960])
def test_a_peak_that_does_not_matter_is_no_surprise(real: int) -> None:
    cost_model = ready_knowledge()
    cost_model.peaked(size(8, 150), 1000, real, matters=False)
    assert state_of(cost_model, 8, 150) is State.TRUSTED
    assert not cost_model.worth_observing(size(8, 150))
    assert cost_model.reliability.uncertainty == pytest.approx(max(0.0, real / 1000 - 1))


def test_an_unconfirmed_surprise_doubles_the_tolerance() -> None:
    cost_model = ready_knowledge()
    cost_model.peaked(size(8, 150), 1000, 1040)
    cost_model.learn(seen(8, 150))
    cost_model.peaked(size(8, 150), 1000, 1040)
    assert state_of(cost_model, 8, 150) is State.TRUSTED
    cost_model.peaked(size(8, 150), 1000, 1070)
    assert state_of(cost_model, 8, 150) is State.SUSPECT


def test_many_surprises_are_no_longer_a_reason_to_observe() -> None:
    cost_model = ready_knowledge()
    for _ in range(16):
        cost_model.surprised()
        assert cost_model.worth_observing(size(8, 150))
        cost_model.learn(seen(8, 150))
    cost_model.surprised()
    assert not cost_model.worth_observing(size(8, 150))


def test_after_a_failure_sizes_as_large_are_observed_until_one_was() -> None:
    cost_model = ready_knowledge()
    cost_model.reliability.failed(size(8, 150))
    cost_model.learn(seen(8, 100))
    assert cost_model.reliability.suspects(size(8, 150))
    assert cost_model.reliability.suspects(size(8, 200))
    assert not cost_model.reliability.suspects(size(8, 100))
    cost_model.learn(seen(8, 200))
    assert not cost_model.reliability.suspects(size(8, 200))


def test_a_failure_is_not_forgotten_because_blocks_run_in_another_order() -> None:
    cost_model = ready_knowledge()
    cost_model.reliability.failed(size(8, 150))
    cost_model.assume_any_order()
    assert cost_model.reliability.suspects(size(8, 150))
    assert cost_model.reliability.doubted


def test_an_observation_that_contradicts_doubted_predictions_voids_them() -> None:
    cost_model = ready_knowledge()
    cost_model.peaked(size(8, 150), 1000, 1100)
    assert cost_model.learn(seen(8, 128, change=10**9))
    now = amounts(told(cost_model.predict(size(8, 128))))
    assert now == amounts(seen(8, 128, change=10**9).profile)
    assert cost_model.predict(size(8, 200)) is None
    assert cost_model.reliability.uncertainty == 0
    assert pattern_of(cost_model.predict(size(8, 128))) == PATTERN


def test_an_observation_that_contradicts_undoubted_predictions_voids_nothing() -> None:
    cost_model = ready_knowledge()
    assert not cost_model.learn(seen(8, 128, change=10**9))
    assert told(cost_model.predict(size(8, 200))) == seen(8, 200).profile


# Measurements on a GPU

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SURVEYED = ("*-bench.jsonl", "*-bench-scale8.jsonl", "*-bench-quick.jsonl")
"""The tasks in which only the length varies."""


def surveys() -> Iterator[Any]:
    for path in sorted(path for name in SURVEYED for path in RESULTS.glob(name)):
        for line in path.open():
            record = json.loads(line)
            if record["kind"] == "survey":
                yield pytest.param(record, id=f"{path.stem} {record['task']}")


def surveyed_sizes(record: dict[str, Any], half_at: int | None) -> list[StepObservation]:
    """Observed steps of distinct sizes, the shortest and the longest first, then in any order.

    The batches are full but for the one at `half_at`.
    """
    read = [StepObservation.from_plain(plain) for plain in record["observations"]]
    largest = max(o.size.dims[0] for o in read)
    distinct = sorted({o.size: o for o in read}.values(), key=lambda o: o.size.dims)
    (half,) = (o for o in distinct if o.size.dims[0] < largest)
    low, *inner, high = (o for o in distinct if o is not half)
    random.Random(0).shuffle(inner)
    sizes = [low, high, *inner]
    return sizes if half_at is None else [*sizes[:half_at], half, *sizes[half_at:]]


def kept_peak(profile: Profile) -> int:
    return peak(profile, [Option.KEEP] * len(profile.runs))


@pytest.mark.parametrize("half_at", [None, 0, 3], ids=["all full", "half first", "half fourth"])
@pytest.mark.parametrize("count", [4, 6, 8, 10])
@pytest.mark.parametrize("record", list(surveys()))
def test_measured_peaks_are_predicted_about_as_well_as_by_a_quadratic(
    record: dict[str, Any], count: int, half_at: int | None
) -> None:
    """The quadratic is one of the number of elements, the batch times the length."""
    observed = surveyed_sizes(record, half_at)
    samples, others = observed[:count], observed[count:]
    assert len(others) >= 4
    dims = np.array([o.size.dims for o in observed])
    elements = dims[:, 0] / dims[-1, 0] * dims[:, int(np.ptp(dims[count:], axis=0).argmax())]
    real = np.array([kept_peak(o.profile) for o in others])
    estimator = taught(samples, samples[0].pattern)
    predictions = [estimator.predict(o.size) for o in others]
    ours = np.array([kept_peak(told(prediction)) for prediction in predictions])
    quadratic = np.polyfit(elements[:count], [kept_peak(o.profile) for o in samples], deg=2)
    plain = np.polyval(quadratic, elements[count:])
    error, error_of_plain = (np.mean(np.abs(guess - real) / real) for guess in (ours, plain))
    assert error <= error_of_plain + 0.005
    assert min(ours / real) >= 0.997


# A batch that is not full


def without_batch_alone(dims: tuple[int, ...]) -> list[int]:
    batch, length = dims
    return [1000, batch * length * 4, batch * length**2]


@pytest.mark.parametrize("smaller", [(4, 100), (1, 64), (7, 350)])
def test_four_sizes_are_enough_for_a_prediction_if_one_batch_is_smaller(
    smaller: tuple[int, int],
) -> None:
    estimator = taught(
        seen(*dims, law=without_batch_alone) for dims in [(8, 64), (8, 300), smaller, (8, 128)]
    )
    for length in (40, 64, 99, 200, 299):
        truth = seen(8, length, law=without_batch_alone)
        assert_exact(estimator.predict(truth.size), truth)


def test_five_sizes_are_enough_for_trust_if_one_batch_is_smaller() -> None:
    estimator = taught(seen(*dims) for dims in [(8, 64), (8, 300), (4, 100), (8, 128)])
    prediction = estimator.predict(size(8, 200))
    assert prediction is not None
    assert prediction.state is State.LEARNING
    assert prediction.uncertainty > 0
    assert (estimator.ready, estimator.unfit) == (False, False)
    assert estimator.predict(size(4, 90)) is None  # bytes may follow the batch alone
    estimator.learn(seen(8, 180))
    assert estimator.ready
    assert state_of(estimator, 8, 200) is State.TRUSTED
    assert_exact(estimator.predict(size(4, 120)), seen(4, 120))


# Quantities for transfers


def test_times_of_backwards_are_predicted_like_those_of_recomputes() -> None:
    estimator = taught(with_backwards(seen(8, n)) for n in (40, 64, 96, 128, 160))
    predicted = estimator.predict(size(8, 100))
    assert predicted is not None
    for run in predicted.profile.runs:
        assert abs(run.backward_nanoseconds - 2 * run.nanoseconds) <= 2


def test_inputs_are_movable_as_in_the_latest_observation() -> None:
    lengths = (40, 64, 96, 128, 160)
    for latest in (True, False):
        estimator = taught(with_backwards(seen(8, n), movable=not latest) for n in lengths[:-1])
        estimator.learn(with_backwards(seen(8, lengths[-1]), movable=latest))
        predicted = estimator.predict(size(8, 100))
        assert predicted is not None
        assert {run.input_movable for run in predicted.profile.runs} == {latest}


def test_a_guess_scales_neither_times_nor_flags() -> None:
    guessed = taught([with_backwards(seen(8, 100))]).guess(size(8, 120))
    assert guessed is not None
    expected = with_backwards(seen(8, 100)).runs
    assert [run[-4:] for run in guessed.profile.runs] == [run[-4:] for run in expected]
