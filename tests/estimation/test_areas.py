"""Images of any size: bytes follow areas in strides, patches and windows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from mimose.costs import StepObservation
from mimose.estimation import Estimator
from mimose.estimation.prediction import State
from observed import Law, assert_exact, seen, size, taught

ROWS = 4


def area(height: int, width: int, unit: int, rounded: Callable[[float], int] = math.ceil) -> int:
    return unit * rounded(height / unit) * unit * rounded(width / unit)


def halving(dims: tuple[int, ...]) -> list[int]:
    """Strides of 4, halved to strides of 8."""
    rows, *sides = dims
    return [1000, rows * area(*sides, 4), 2 * rows * area(*sides, 8)]


def cut_off(dims: tuple[int, ...]) -> list[int]:
    """Strides rounded down: the remainder at the sides is dropped."""
    rows, *sides = dims
    return [1000, rows * area(*sides, 16, math.floor), 3 * rows * area(*sides, 32, math.floor)]


def attending(dims: tuple[int, ...]) -> list[int]:
    """Attention between all patches of 16."""
    rows, *sides = dims
    patches = area(*sides, 16, math.floor) // 256
    return [1000, 90 * rows * patches, rows * patches**2]


def in_windows(dims: tuple[int, ...]) -> list[int]:
    """Patches of 4, padded to windows of 7."""
    rows, *sides = dims
    return [1000, rows * area(*sides, 4), 2 * rows * area(*sides, 28)]


LAWS = [halving, cut_off, attending, in_windows]


def sides(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Heights and widths of images, landscape and portrait."""
    dice = random.Random(seed)
    shorter = [dice.randint(256, 448) for _ in range(count)]
    sizes = [(short, int(short * dice.uniform(1, 1.8))) for short in shorter]
    return [size if dice.random() < 0.6 else size[::-1] for size in sizes]


def state_of(estimator: Estimator, *sides: int) -> State | None:
    prediction = estimator.predict(size(ROWS, *sides))
    return None if prediction is None else prediction.state


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("seed", range(3))
def test_images_are_soon_predicted_exactly_and_trusted(law: Law, seed: int) -> None:
    observed, others = sides(10, seed), sides(100, seed + 10)
    estimator = taught(seen(ROWS, *each, law=law) for each in observed)
    least, *_, most = sorted(height * width for height, width in observed)
    inner = [each for each in others if 1.02 * least < math.prod(each) < 0.98 * most]
    assert len(inner) > 40
    trusted = [each for each in inner if state_of(estimator, *each) is State.TRUSTED]
    assert len(trusted) > 0.8 * len(inner)
    for each in trusted:
        assert_exact(estimator.predict(size(ROWS, *each)), seen(ROWS, *each, law=law))


@pytest.mark.parametrize("law", [halving, cut_off, attending])
def test_six_images_are_enough_if_nothing_is_padded_to_windows(law: Law) -> None:
    observed = sides(6)
    estimator = taught(seen(ROWS, *each, law=law) for each in observed[:5])
    assert not estimator.ready
    estimator.learn(seen(ROWS, *observed[5], law=law))
    assert estimator.ready


def test_a_side_beyond_the_observed_range_is_trusted_if_the_area_is_within() -> None:
    observed = [(300, 400), (320, 400), (400, 380), (420, 333), (350, 350), (380, 410), (270, 300)]
    estimator = taught(seen(ROWS, *each, law=halving) for each in observed)
    for each in ((260, 500), (510, 280)):
        assert state_of(estimator, *each) is State.TRUSTED
        assert_exact(estimator.predict(size(ROWS, *each)), seen(ROWS, *each, law=halving))
    assert state_of(estimator, 420, 410) is not State.TRUSTED
    assert state_of(estimator, 250, 260) is not State.TRUSTED


def in_windows_of_three(dims: tuple[int, ...]) -> StepObservation:
    """One run on patches of 4, two on patches of 16; all pad to windows of 3."""

    def on_patches(unit: int) -> StepObservation:
        def law(dims: tuple[int, ...]) -> list[int]:
            rows, *sides = dims
            return [1000, rows * area(*sides, unit), 2 * rows * area(*sides, 3 * unit)]

        return seen(*dims, law=law)

    fine, coarse = on_patches(4), on_patches(16)
    return fine.with_runs([fine.runs[0], *coarse.runs[1:]])


def test_images_of_more_windows_than_any_seen_are_not_trusted() -> None:
    observed = [(129, 96), (83, 125), (87, 109), (78, 117), (82, 123), (103, 70), (80, 120)]
    observed += [(100, 90), (125, 94)]
    assert {area(*each, 48) // 48**2 for each in observed} == {6}
    estimator = taught(in_windows_of_three((ROWS, *each)) for each in observed)
    assert state_of(estimator, 90, 110) is State.TRUSTED
    assert area(98, 101, 48) // 48**2 == 9
    assert math.prod((98, 101)) < max(map(math.prod, observed))
    assert state_of(estimator, 98, 101) is not State.TRUSTED
    estimator.learn(in_windows_of_three((ROWS, 97, 105)))
    assert_exact(estimator.predict(size(ROWS, 98, 101)), in_windows_of_three((ROWS, 98, 101)))


def test_sources_and_targets_are_not_taken_for_the_sides_of_an_image() -> None:
    def law(dims: tuple[int, ...]) -> list[int]:
        rows, source, target = dims
        return [1000, 40 * rows * source + 25 * rows * target, rows * source * target]

    dice = random.Random(3)
    pairs = [(dice.randint(40, 400), dice.randint(10, 90)) for _ in range(12)]
    for count in range(6, 13):
        estimator = taught(seen(ROWS, *pair, law=law) for pair in pairs[:count])
        for pair in ((100, 80), (300, 30), (200, 50)):
            prediction, truth = estimator.predict(size(ROWS, *pair)), seen(ROWS, *pair, law=law)
            if prediction is not None and prediction.trusted:
                assert_exact(prediction, truth)
    assert estimator.ready
