"""Memory that is no polynomial of the size is predicted well after few steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from mimose.costs import InputSize, Option, Profile, RunCost, StepObservation, peak
from mimose.estimation import Estimator

BLOCKS = 8
KEPT, AGAIN = [Option.KEEP] * BLOCKS, [Option.RECOMPUTE] * BLOCKS
PATTERN = tuple((k, 0) for k in range(BLOCKS))

Making = Callable[[InputSize], StepObservation]


def step(size: InputSize, area: float, head: float) -> StepObservation:
    """Blocks whose bytes follow an area, below a head of its own."""
    layer = RunCost(
        boundary=int(8 * area),
        forward_peak=int(130 * area),
        backward_entry=int(8 * area),
        saved=int(180 * area),
        recompute_peak=int(220 * area),
        backward_peak=int(57 * area),
        output_saved=0,
        droppable_input=0,
    )
    inputs = int(8 * area) * BLOCKS
    profile = Profile(
        size, (layer._replace(boundary=0), *(layer,) * (BLOCKS - 1)), inputs, inputs + int(head)
    )
    return StepObservation(
        pattern=PATTERN, profile=profile, gradients_allocated=(0,) * BLOCKS, allocates=True
    )


def with_chunked_loss(size: InputSize) -> StepObservation:
    """The head's memory grows with the row up to a chunk of 2,048 tokens, and hardly after that."""
    (_, length) = size.dims
    return step(size, length, 520 * min(length, 2048) + 8 * length)


def image(stride: int, rounded: Callable[[float], int]) -> Making:
    """A network that looks at images in strides, and pads them, or cuts them off."""

    def seen(size: InputSize) -> StepObservation:
        _, _, height, width = size.dims
        area = rounded(height / stride) * rounded(width / stride)
        return step(size, area, 4 * height * width)

    return seen


def rows(draw: random.Random) -> InputSize:
    return InputSize((("input_ids", 2),), (1, draw.randint(500, 8000)))


def images(draw: random.Random) -> InputSize:
    return InputSize((("x", 4),), (8, 3, draw.randint(180, 420), draw.randint(180, 420)))


def learned(make: Making, sizes: Iterable[InputSize]) -> tuple[int, list[float]]:
    """How many steps were not trusted, and by how much peaks of the others were too high."""
    estimator, untrusted, errors = Estimator(PATTERN), 0, []
    for size in sizes:
        truth, told = make(size), estimator.predict(size)
        if told is None or not told.trusted:
            untrusted += 1
            estimator.learn(truth)
            continue
        # Plans leave room for the uncertainty.
        room = 1 + told.uncertainty
        pairs = [(peak(told.profile, p), peak(truth.profile, p)) for p in (KEPT, AGAIN)]
        errors += [room * thought / real - 1 for thought, real in pairs]
    return untrusted, errors


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("make", "drawn", "most"),
    [
        (with_chunked_loss, rows, 14),
        (image(4, math.ceil), images, 18),
        (image(16, math.floor), images, 18),
    ],
    ids=["a loss in chunks", "images in strides of 4, padded", "patches of 16, cut off"],
)
def test_most_of_a_hundred_steps_are_trusted_and_never_predicted_too_low(
    make: Making, drawn: Callable[[random.Random], InputSize], most: int, seed: int
) -> None:
    draw = random.Random(seed)
    untrusted, errors = learned(make, [drawn(draw) for _ in range(100)])
    assert untrusted <= most
    assert min(errors) >= -0.003
    assert sum(max(0.0, error) for error in errors) / len(errors) <= 0.03
