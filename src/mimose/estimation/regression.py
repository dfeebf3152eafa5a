"""Least squares for all quantities at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mimose.estimation.dimensions import Shape
from mimose.estimation.rows import Floats

_TELLS_APART = 1e-10
"""How much of a feature others must leave unexplained, as a share, for it to count."""


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
        fitted = _fitted(features, values)
        if fitted is None:
            return None
        coefficients, missed = fitted
        unexplained = float(np.abs(missed[:, :-1]).max(0).sum())
        return cls(shape, points, coefficients, values - missed, unexplained)

    def predict(self, point: Sequence[float]) -> Floats:
        row: Floats = np.dot(self.shape.features(point), self.coefficients)
        return row


def _fitted(features: Floats, values: Floats) -> tuple[Floats, Floats] | None:
    """Coefficients of the features, and what fits without it miss of each row of values."""
    scale = np.abs(features).max(0).clip(min=1e-300)
    if len(features) <= len(scale):
        return None
    q, r = np.linalg.qr(features / scale)
    diagonal = np.abs(np.diagonal(r))
    if diagonal.min() <= _TELLS_APART * diagonal.max():
        return None
    projected = q.T @ values
    leverage = np.clip((q**2).sum(1), 0, 1 - 1e-6)
    missed = (values - q @ projected) / (1 - leverage)[:, None]
    return np.linalg.solve(r, projected) / scale[:, None], missed


def largest_of_others(rows: Floats) -> Floats:
    """For each row, in each column the largest of all other rows."""
    if rows.shape[-2] < 2:
        return np.zeros_like(rows)
    first = rows.max(-2, keepdims=True)
    at_first = rows == first
    second = np.where(at_first, -np.inf, rows).max(-2, keepdims=True)
    largest: Floats = np.where(at_first, np.maximum(second, 0), first)
    return largest
