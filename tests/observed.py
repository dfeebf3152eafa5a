"""Observations of steps whose costs follow a law, and estimators that learn from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from mimose.costs.input_size import InputSize
from mimose.costs.observations import Pattern, StepObservation
from mimose.costs.run_cost import SUBTRACTED, RunCost
from mimose.costs.timeline import Profile
from mimose.estimation.estimator import Estimator
from mimose.estimation.prediction import Prediction

Law = Callable[[tuple[int, ...]], list[int]]
"""Maps dimensions to the terms that bytes are sums of."""

PATTERN = ((0, 0), (1, 0), (2, 0))
BYTES = RunCost._fields[: RunCost._fields.index("nanoseconds")]


def in_length(dims: tuple[int, ...]) -> list[int]:
    batch, length = dims
    return [1000, batch * 10, batch * length * 4, batch * length**2]


def seen(
    *dims: int,
    law: Law = in_length,
    pattern: Pattern = PATTERN,
    layout: Any = None,
    change: int = 0,
    seconds: Sequence[float] | None = None,
    allocated: Sequence[int] | None = None,
    in_all: int | None = None,
    allocates: bool = True,
    fixed: Sequence[bool] = (),
) -> StepObservation:
    """An observed step in which each quantity is another linear combination of the law's terms."""
    parts = law(dims)

    def amount(n: int) -> int:
        return change + sum((1 + (5 * n + 3 * m) % 7) * part for m, part in enumerate(parts))

    runs = []
    for k in range(len(pattern)):
        costs = {name: amount(len(BYTES) * k + i) for i, name in enumerate(BYTES)}
        time = seconds[k] if seconds else 1e-4 + costs["saved"] * 1e-9
        is_fixed = bool(fixed) and fixed[k]
        runs.append(RunCost(**costs, nanoseconds=round(time * 1e9), fixed=is_fixed))
    size = InputSize(layout or (("0", len(dims)),), dims)
    return StepObservation(
        pattern=pattern,
        profile=Profile(size, tuple(runs), *(amount(100 + i) for i in range(4))),
        gradients_allocated=tuple(allocated) if allocated else (0,) * len(pattern),
        all_gradients_allocated=in_all,
        allocates=allocates,
    )


def taught(observations: Iterable[StepObservation], pattern: Pattern = PATTERN) -> Estimator:
    estimator = Estimator(pattern)
    for observation in observations:
        estimator.learn(observation)
    return estimator


def size(*dims: int) -> InputSize:
    return InputSize((("0", len(dims)),), dims)


def amounts(profile: Profile) -> list[int]:
    """All bytes of a profile, in one list."""
    per_run = [getattr(run, name) for run in profile.runs for name in BYTES]
    return [*per_run, profile.head_forward, profile.head_backward, profile.tail]


def told(prediction: Prediction | None) -> Profile:
    """The profile of a prediction; fails if there is none."""
    assert prediction is not None
    return prediction.profile


def pattern_of(prediction: Prediction | None) -> Pattern:
    """The runs that a prediction is for; fails if there is none."""
    assert prediction is not None
    return prediction.pattern


def assert_exact(prediction: Prediction | None, truth: StepObservation) -> None:
    predicted = told(prediction)
    assert predicted.size == truth.size
    assert amounts(predicted) == pytest.approx(amounts(truth.profile), abs=1)


def assert_no_lower(prediction: Prediction | None, truth: StepObservation, slack: int = 1) -> None:
    names = [*BYTES * len(truth.runs), "head_forward", "head_backward", "tail"]
    rows = zip(names, amounts(told(prediction)), amounts(truth.profile), strict=True)
    for name, guess, real in rows:
        taken_off = name in SUBTRACTED
        assert (guess <= real + slack) if taken_off else (guess >= real - slack), name
