"""Least squares for all quantities at once, each by the features that explain it best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mimose.estimation.dimensions import Shape
from mimose.estimation.rows import Floats

_TELLS_APART = 1e-10
"""How much of a feature others must leave unexplained, as a share, for it to count."""
_TO_CHOOSE = 2
"""Observations it takes beyond those that a fit needs, to choose between features."""
_ROUNDING = 1e-9
"""Errors that are equal, as a share of the largest value."""


@dataclass(frozen=True, slots=True)
class Regression:
    """A fit of all quantities."""

    shape: Shape
    points: list[list[int]]
    """The varying dimensions of each observation."""
    coefficients: Floats
    """One row a feature, one column a quantity."""
    left_out: Floats
    """What each observation would be predicted as by a fit of all the others."""
    unexplained: float
    """What the fits of the others miss, of all quantities that peaks depend on, in bytes."""

    @classmethod
    def of(cls, shape: Shape, points: list[list[int]], values: Floats) -> Regression | None:
        """None if the observations are too few, or too much alike to tell features apart."""
        features = np.array([shape.features(point) for point in points])
        distinct, at = np.unique(values, axis=1, return_inverse=True)  # blocks are much alike
        fitted = _fitted(features, shape.choices(features.shape[1]), distinct)
        if fitted is None:
            return None
        coefficients, missed = (each[:, at.reshape(-1)] for each in fitted)
        unexplained = float(np.abs(missed[:, :-1]).max(0).sum())
        return cls(shape, points, coefficients, values - missed, unexplained)

    def predict(self, point: Sequence[float]) -> Floats:
        row: Floats = np.dot(self.shape.features(point), self.coefficients)
        return row


def _fitted(
    features: Floats, choices: Sequence[Sequence[int]], values: Floats
) -> tuple[Floats, Floats] | None:
    """Coefficients of the features, and what fits without it miss of each value.

    Each column of values has the choice of features whose fits of all but one miss the least of
    that one. What fits without a row miss in it is told by the choice that the others would make.
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
