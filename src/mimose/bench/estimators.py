"""The paper's comparison of estimators, on the sizes that were observed, with ours beside them.

Each learns from a few observed sizes the peak above the step's start with everything kept, and is
asked for that of all the others. Ours learns every quantity of every block at once, and its peak is
computed from them.
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
from mimose.bench.survey import Survey
from mimose.costs import StepObservation
from mimose.estimation import Estimator
from mimose.planning import KeepAll

SAMPLES = (4, 6, 8, 10)
_REPEATS = 7

Predict = Callable[[StepObservation], float]


def compare(survey: Survey) -> list[dict[str, Any]]:
    """A row an estimator and number of samples; empty if too few sizes were observed."""
    seen = _in_random_order(survey)
    rows = []
    for count in SAMPLES:
        if count <= len(seen) - 2:
            for name, fit in _estimators().items():
                row = _judged(fit, seen[:count], seen[count:])
                if row is not None:
                    rows.append({"estimator": name, "samples": count, **row})
    return rows


def _in_random_order(survey: Survey) -> list[StepObservation]:
    """Distinct full batches; the smallest and the largest first: nobody has to extrapolate."""
    distinct = list({o.size: o for o in survey.full_batches}.values())
    distinct.sort(key=lambda o: o.size.dims)
    ends, inner = [distinct[0], distinct[-1]], distinct[1:-1]
    random.Random(0).shuffle(inner)
    return ends + inner


def _judged(
    fit: Callable[[Sequence[StepObservation]], Predict | None],
    train: Sequence[StepObservation],
    test: Sequence[StepObservation],
) -> dict[str, float] | None:
    predict, fit_seconds = None, []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        predict = fit(train)
        fit_seconds.append(time.perf_counter() - began)
    if predict is None:
        return None
    errors, latencies = [], []
    for observation in test:
        began = time.perf_counter()
        guess = predict(observation)
        latencies.append(time.perf_counter() - began)
        truth = _peak(observation)
        errors.append(abs(guess - truth) / truth)
    return {
        "fit_ms": 1e3 * statistics.median(fit_seconds),
        "predict_ms": 1e3 * statistics.median(latencies),
        "mean_error": float(np.mean(errors)),
        "worst_error": float(np.max(errors)),
    }


def _peak(observation: StepObservation) -> float:
    return float(KeepAll().plan(observation.profile, 0).peak_bytes)


def _ours(train: Sequence[StepObservation]) -> Predict | None:
    estimator = Estimator(train[0].pattern)
    for observation in train:
        estimator.learn(observation)

    def predict(observation: StepObservation) -> float:
        prediction = estimator.predict(observation.size) or estimator.bound(observation.size)
        assert prediction is not None
        return float(KeepAll().plan(prediction.profile, 0).peak_bytes)

    return predict


def _estimators() -> dict[str, Callable[[Sequence[StepObservation]], Predict | None]]:
    linear_model, svm = need("sklearn.linear_model"), need("sklearn.svm")
    compose, preprocessing = need("sklearn.compose"), need("sklearn.preprocessing")
    make_pipeline, tree = need("sklearn.pipeline").make_pipeline, need("sklearn.tree")
    standard = preprocessing.StandardScaler

    def polynomial(degree: int) -> Any:
        return make_pipeline(
            standard(), preprocessing.PolynomialFeatures(degree), linear_model.LinearRegression()
        )

    found = {
        **{f"polynomial, degree {d}": _regression(polynomial, d) for d in (1, 2, 3)},
        # Inputs and outputs standardised: on raw bytes an SVR predicts next to nothing.
        "SVR": _regression(
            lambda: compose.TransformedTargetRegressor(
                make_pipeline(standard(), svm.SVR()), transformer=standard()
            )
        ),
        "decision tree": _regression(tree.DecisionTreeRegressor, random_state=0),
    }
    if importlib.util.find_spec("xgboost") is not None:
        found["XGBoost"] = _regression(need("xgboost").XGBRegressor)
    return {**found, "mimose": _ours}


def _regression(
    make: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[[Sequence[StepObservation]], Predict]:
    def fit(train: Sequence[StepObservation]) -> Predict:
        points = np.array([o.size.dims for o in train], float)
        model = make(*args, **kwargs).fit(points, np.array([_peak(o) for o in train]))
        return lambda o: float(model.predict(np.array([o.size.dims], float))[0])

    return fit
