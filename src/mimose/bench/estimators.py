"""The paper's comparison of estimators (its Table 3), on sizes that were observed, and ours.

Each learns from a few observed sizes and is asked about all the others: for the peak above the
step's start with everything kept, and for the bytes that each layer saves. The others learn one
quantity at a time, so they have a model for each layer. Ours learns every quantity of every layer
at once, and computes the peak from them.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mimose.bench.extras import need
from mimose.bench.survey import planned_with
from mimose.costs import Profile, StepObservation
from mimose.estimation import Estimator
from mimose.planning import KeepAll

SAMPLES = (4, 6, 8, 10, 50)
SIZES = 60
"""How many sizes to observe, so that there are some beyond the samples."""
_REPEATS = 5

Quantities = Callable[[Profile], Sequence[float]]
"""What is to be predicted of a step."""
Predict = Callable[[StepObservation], "Sequence[float] | None"]
"""None where an estimator does not know yet."""
Fit = Callable[[Sequence[StepObservation], Quantities], Predict]


def compare(observations: Sequence[StepObservation]) -> list[dict[str, Any]]:
    """A row an estimator and number of samples; empty if too few sizes were observed."""
    seen = _in_random_order(observations)
    counts = [count for count in SAMPLES if count <= len(seen) - 2]
    rows = []
    for count in counts:
        for name, fit in _estimators().items():
            row = fit if isinstance(fit, str) else _row(fit, seen, count)
            told = {"missing": row} if isinstance(row, str) else row
            rows.append({"estimator": name, "samples": count, **told})
    return rows


def _in_random_order(observations: Sequence[StepObservation]) -> list[StepObservation]:
    """Distinct sizes; the smallest and the largest first: nobody has to extrapolate."""
    distinct = list({o.size: o for o in observations}.values())
    distinct.sort(key=lambda o: (_peak(o.profile), o.size.dims))
    ends, inner = [distinct[0], distinct[-1]], distinct[1:-1]
    random.Random(0).shuffle(inner)
    return ends + inner


def _row(fit: Fit, seen: Sequence[StepObservation], count: int) -> dict[str, float] | str:
    train, test = seen[:count], seen[count:]
    peak, layers = (_judged(fit, train, test, each) for each in (_peak, _saved_by_layer))
    if peak is None or layers is None:
        return "predicts no other size yet"
    return {**peak, **{f"layers_{name}": value for name, value in layers.items()}}


def _judged(
    fit: Fit,
    train: Sequence[StepObservation],
    test: Sequence[StepObservation],
    quantities: Quantities,
) -> dict[str, float] | None:
    """Times and errors; None if there is no prediction to judge."""
    fit_seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        predict = fit(train, quantities)
        fit_seconds.append(time.perf_counter() - began)
    errors: list[float] = []
    latencies, unknown = [], 0
    for observation in test:
        began = time.perf_counter()
        guesses = predict(observation)
        latencies.append(time.perf_counter() - began)
        if guesses is None:
            unknown += 1
            continue
        pairs = zip(guesses, quantities(observation.profile), strict=True)
        errors += [abs(guess - truth) / truth for guess, truth in pairs if truth]
    if not errors:
        return None
    return {
        "fit_ms": 1e3 * statistics.median(fit_seconds),
        "predict_ms": 1e3 * statistics.median(latencies),
        "mean_error": float(np.mean(errors)),
        "worst_error": float(np.max(errors)),
        "not_predicted": unknown / len(test),
    }


def _peak(profile: Profile) -> Sequence[float]:
    return [float(KeepAll().plan(profile, 0).peak_bytes)]


def _saved_by_layer(profile: Profile) -> Sequence[float]:
    return [float(run.saved) for run in profile.runs]


def _ours(train: Sequence[StepObservation], quantities: Quantities) -> Predict:
    estimator = Estimator(train[0].pattern)
    for observation in train:
        estimator.learn(observation)

    def predict(observation: StepObservation) -> Sequence[float] | None:
        prediction = planned_with(estimator, observation.size)
        return None if prediction is None else quantities(prediction.profile)

    return predict


def _estimators() -> dict[str, Fit | str]:
    """By name; a sentence in place of one that is not installed."""
    linear_model, svm = need("sklearn.linear_model"), need("sklearn.svm")
    compose, preprocessing = need("sklearn.compose"), need("sklearn.preprocessing")
    make_pipeline, tree = need("sklearn.pipeline").make_pipeline, need("sklearn.tree")
    standard = preprocessing.StandardScaler

    def polynomial(degree: int) -> Any:
        return make_pipeline(
            standard(), preprocessing.PolynomialFeatures(degree), linear_model.LinearRegression()
        )

    return {
        **{f"polynomial, degree {d}": _regression(polynomial, d) for d in (1, 2, 3)},
        # Inputs and outputs standardised: on raw bytes an SVR predicts next to nothing.
        "SVR": _regression(
            lambda: compose.TransformedTargetRegressor(
                make_pipeline(standard(), svm.SVR()), transformer=standard()
            )
        ),
        "decision tree": _regression(tree.DecisionTreeRegressor, random_state=0),
        "XGBoost": _xgboost(),
        "mimose": _ours,
    }


def _xgboost() -> Fit | str:
    if importlib.util.find_spec("xgboost") is None:
        return "xgboost is not installed"
    return _regression(need("xgboost").XGBRegressor, n_jobs=1)


def _regression(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Fit:
    """A model for each quantity, of all dimensions of the input."""

    def fit(train: Sequence[StepObservation], quantities: Quantities) -> Predict:
        points = np.array([o.size.dims for o in train], float)
        columns = np.array([quantities(o.profile) for o in train]).T
        models = [make(*args, **kwargs).fit(points, column) for column in columns]

        def predict(observation: StepObservation) -> Sequence[float]:
            point = np.array([observation.size.dims], float)
            return [float(model.predict(point)[0]) for model in models]

        return predict

    return fit
