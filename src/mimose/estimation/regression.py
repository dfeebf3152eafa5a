"""Linear least squares for all quantities, each with the features that explain it best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mimose.estimation.dimensions import Shape
from mimose.estimation.rows import Floats

_TELLS_APART = 1e-10
"""Features are collinear if a diagonal element of R (QR) is below this fraction of the largest."""
_TO_CHOOSE = 2
"""Additional observations needed to choose between sets of features."""
_ROUNDING = 1e-9
"""Errors below this fraction of the largest value count as equal."""


@dataclass(frozen=True, slots=True)
class Regression:
    """A linear fit of all quantities."""

    shape: Shape
    points: list[list[int]]
    """The values of the symbols at each observation."""
    coefficients: Floats
    """One row for each feature, one column for each quantity."""
    left_out: Floats
    """Leave-one-out predictions; one row for each observation, one column for each quantity."""
    unexplained: float
    """The largest leave-one-out error in bytes, summed over all quantities that peaks depend on."""

    @classmethod
    def of(cls, shape: Shape, points: list[list[int]], values: Floats) -> Regression | None:
        """The fit; None if there are too few observations, or if their features are collinear."""
        features = np.array([shape.features(point) for point in points])
        choices = shape.choices(features.shape[1])
        distinct, at = _distinct(values) if len(choices) > 1 else (values, slice(None))
        fitted = _fitted(features, choices, distinct)
        if fitted is None:
            return None
        coefficients, missed = (each[:, at] for each in fitted)
        unexplained = float(np.abs(missed[:, :-1]).max(0).sum())
        return cls(shape, points, coefficients, values - missed, unexplained)

    def predict(self, point: Sequence[float]) -> Floats:
        row: Floats = np.dot(self.shape.features(point), self.coefficients)
        return row


def _distinct(values: Floats) -> tuple[Floats, npt.NDArray[np.intp]]:
    """The distinct columns, and the index of the distinct column for each column.

    Similar blocks have equal columns.
    """
    distinct, at = np.unique(values, axis=1, return_inverse=True)
    return distinct, at.reshape(-1)


def _fitted(
    features: Floats, choices: Sequence[Sequence[int]], values: Floats
) -> tuple[Floats, Floats] | None:
    """The coefficients of the features, and the leave-one-out errors of the values.

    Each column uses the set of features (`choices`) with the smallest maximum of its leave-one-out
    errors. The error of a row is that of the set which the errors of the other rows would choose.
    Leave-one-out errors follow from one fit: residual / (1 − leverage).
    """
    scale = np.abs(features).max(0).clip(min=1e-300)
    used = (features / scale)[:, choices].transpose(1, 0, 2)
    if used.shape[1] <= used.shape[2] + (_TO_CHOOSE if len(choices) > 1 else 0):
        return None
    q, r = np.linalg.qr(used)
    diagonal = np.abs(np.diagonal(r, axis1=1, axis2=2))
    sound = diagonal.min(1) > _TELLS_APART * diagonal.max(1)
    if not sound.any():
        return None
    q, r, terms = q[sound], r[sound], np.array(choices)[sound]
    projected = q.transpose(0, 2, 1) @ values
    leverage = np.clip((q**2).sum(2), 0, 1 - 1e-6)
    missed = (values - q @ projected) / (1 - leverage)[:, :, None]
    worst = np.maximum(np.abs(missed), _ROUNDING * np.abs(values).max(0))
    best, columns = worst.max(1).argmin(0), np.arange(values.shape[1])
    solved = np.linalg.solve(r, projected)[best, :, columns]
    coefficients = np.zeros((features.shape[1], values.shape[1]))
    coefficients[terms[best].T, columns] = solved.T
    by_others = largest_of_others(worst).argmin(0)
    return coefficients / scale[:, None], np.take_along_axis(missed, by_others[None], 0)[0]


def largest_of_others(rows: Floats) -> Floats:
    """For each row, in each column the largest of all other rows."""
    if rows.shape[-2] < 2:
        return np.zeros_like(rows)
    first = rows.max(-2, keepdims=True)
    at_first = rows == first
    second = np.where(at_first, -np.inf, rows).max(-2, keepdims=True)
    largest: Floats = np.where(at_first, np.maximum(second, 0), first)
    return largest
