"""One fit for all runs and all quantities at once: observations in, a profile at any size out.

Bytes are polynomials of the shape: a constant plus the batch times monomials of the other sizes up
to degree two. The fit is one linear least-squares problem.

Levels follow such polynomials exactly. Peaks are the largest of several of them, so they have kinks
that no polynomial follows; but they stay convex, and for a convex function the chord between two
observed sizes is never too low. So where a quantity's own leave-one-out error says that it has
kinks, the larger of fit and chord is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from mimose.costs import TAKEN_OFF, InputSize, Profile, RunCost, StepObservation
from mimose.estimation.dimensions import Shape
from mimose.estimation.times import Floats, Times

_QUANTITIES = (
    *("start", "forward", "entry", "saved", "spike", "back", "out_saved", "in_idle", "gap"),
    "input",
)
_quantities = attrgetter(*_QUANTITIES)
_SAVED = _QUANTITIES.index("saved")
_TAKEN_OFF = [name in TAKEN_OFF for name in _QUANTITIES]
_OF_STEP = 4
"""How many quantities are of the step, not of a run: the head's two, the tail, the prelude."""
_FAIR_ERROR = 0.02
"""The leave-one-out error of the peak, as a share of it, at which predictions are trusted."""
_TO_DOUBT = 4
"""Observations it takes to doubt that the first dimension is the batch."""
_EXACT_ERROR = 0.001
"""The error, as a share of the peak, up to which a quantity counts as an exact polynomial."""
REACH = 0.02
"""How far beyond the largest size seen predictions go, as a share of it."""
_EXACT_REACH = 0.1
"""The same for a fit without a visible error."""
_MOST_UNCERTAIN = 0.25
"""How far off an extrapolated peak may be, as a share of it, to be worth telling."""
_PER_SIZE = 0.1
"""The least that it may be off at twice the largest size seen; in proportion elsewhere. Another
moment of the step may have become the highest: 9 % at twice the largest, of an encoder."""
_STEEPEST = 6
"""The power of a size with which memory grows at most. Attention over square images: the fourth."""


@dataclass(slots=True)
class Fit:
    """Polynomials through all observations of one pattern, and where to believe them."""

    shape: Shape
    points: list[list[int]]
    """The varying dimensions of each observation."""
    values: Floats
    """One row an observation, one column a quantity of a run; those of the step come last."""
    coefficients: Floats
    kinked: npt.NDArray[np.bool_]
    error: float
    times: Times
    fixed: tuple[bool, ...]
    _low: list[int] = field(init=False)
    _high: list[int] = field(init=False)
    _kinks: bool = field(init=False)
    _capped: npt.NDArray[np.bool_] = field(init=False)
    """Which quantities are never more than at a larger size."""
    _taken_off: npt.NDArray[np.bool_] = field(init=False)
    _ladder: _Ladder | None = field(init=False)

    def __post_init__(self) -> None:
        columns = list(zip(*self.points, strict=True))
        self._low, self._high = [min(c) for c in columns], [max(c) for c in columns]
        self._kinks = bool(self.kinked.any())
        self._capped = ~self.kinked & self._rising()
        self._taken_off = np.array([*_TAKEN_OFF * len(self.fixed), *[False] * _OF_STEP])
        one = len(columns) == 1
        self._ladder = _Ladder.of(columns[0], self.values, self._capped) if one else None

    @property
    def fair(self) -> bool:
        return self.error <= _FAIR_ERROR

    @classmethod
    def of(cls, observations: list[StepObservation]) -> Fit | None:
        """The fit of these, with the dimension for the batch that explains them best."""
        usual, *others = Shape.of([o.size for o in observations]).alternatives()
        best = cls.with_shape(usual, observations)
        if len(observations) < _TO_DOUBT or (best is not None and best.fair):
            return best
        # While there are too few for the usual one, another has to explain them exactly: sizes that
        # lie near one line seem to be explained by much.
        least = _EXACT_ERROR if best is None else best.error
        for shape in others:
            fit = cls.with_shape(shape, observations)
            if fit is not None and fit.error < least:
                best, least = fit, fit.error
        return best

    @classmethod
    def with_shape(cls, shape: Shape, observations: list[StepObservation]) -> Fit | None:
        points = [shape.point(o.size) for o in observations]
        features = np.array([shape.features(point) for point in points])
        if len(observations) <= features.shape[1]:
            return None
        values = np.array([row_of(o) for o in observations], float)
        coefficients, _, rank, _ = np.linalg.lstsq(features, values, rcond=None)
        if rank < features.shape[1]:
            return None
        left_out = _leave_one_out(features, values, coefficients)
        fixed = tuple(run.fixed for run in observations[-1].runs)
        peaks = _all_peaks(fixed, values)
        wrong = np.abs(_all_peaks(fixed, left_out) - peaks) / peaks
        # The smallest and the largest do not count: a fit of the others would have to reach beyond
        # its range for them, as predictions never do.
        volume = values.sum(1)
        wrong[[int(volume.argmin()), int(volume.argmax())]] = 0
        return cls(
            shape=shape,
            points=points,
            values=values,
            coefficients=coefficients,
            kinked=np.max(np.abs(values - left_out) / peaks[:, :1], axis=0) > _EXACT_ERROR,
            error=float(wrong.max()),
            times=Times.of(observations),
            fixed=fixed,
        )

    def predict(self, size: InputSize) -> Profile | None:
        point = self.shape.covering_point(size)
        beyond = self.beyond(size)
        reach = REACH if self.error > _EXACT_ERROR else _EXACT_REACH
        if point is None or beyond > reach:
            return None
        row: Floats = np.dot(self.shape.features(point), self.coefficients)
        if not self.fair:
            row = self._upper_end(row)
        else:
            row = self._within_neighbours(point, row)
            if self._kinks:
                row = self._mind_kinks(point, row)
        if beyond > 0:
            row = row * (1 + beyond * 0.5)
            if len(point) == 1:  # a fit of sizes that lie close together may shoot up
                row = np.minimum(row, self.values.max(0) * (1 + beyond) ** _STEEPEST)
        return self._profile(size, np.maximum(row, 0))

    def extrapolate(self, size: InputSize) -> tuple[Profile, float] | None:
        """The profile at a size beyond those seen, and how far off its peaks may be, as a share.

        For questions, not for plans: memory is taken to go on growing as it did between the sizes
        seen. None where nobody can say, and where the answer would be a guess.
        """
        point = self.shape.covering_point(size)
        if point is None or not self.fair:
            return None
        features = np.array(self.shape.features(point))
        row = self._within_neighbours(point, np.dot(features, self.coefficients))
        uncertainty = max(self._uncertainty(features, row), _PER_SIZE * self.beyond(size))
        if uncertainty > _MOST_UNCERTAIN:
            return None
        return self._profile(size, np.maximum(row, 0)), uncertainty

    def _uncertainty(self, features: Floats, row: Floats) -> float:
        """Three standard errors of the peaks, all kept and all recomputed, as a share of them."""
        seen = np.array([self.shape.features(point) for point in self.points])
        peaks = _all_peaks(self.fixed, self.values)
        inverse = np.linalg.pinv(seen)
        residual = peaks - seen @ (inverse @ peaks)
        spread = np.sqrt((residual**2).sum(0) / max(1, len(seen) - seen.shape[1]))
        leverage = 1 + ((features @ inverse) ** 2).sum()
        return float((3 * spread * np.sqrt(leverage) / _all_peaks(self.fixed, row[None])[0]).max())

    def covers(self, size: InputSize) -> bool:
        return self.beyond(size) == 0

    def below(self, size: InputSize) -> bool:
        """Whether a size is smaller than all seen in one of several dimensions: a quantity may have
        a kink on the way there that nobody has seen."""
        point = self.shape.covering_point(size)
        return len(self._low) > 1 and point is not None and not _at_most(self._low, point)

    def beyond(self, size: InputSize) -> float:
        """How far a size lies beyond the largest seen, as a share of it; inf if nobody can say."""
        point = self.shape.covering_point(size)
        if point is None:
            return math.inf
        shares = ((x - high) / max(high, 1) for x, high in zip(point, self._high, strict=True))
        return max(0.0, *shares) if self._high else 0.0

    def expects(self, observation: StepObservation) -> bool:
        """Whether an observation lies on the curve that older ones gave."""
        if self.error > _EXACT_ERROR or not self.shape.describes(observation.size):
            return False
        point = self.shape.point(observation.size)
        thought: Floats = np.dot(self.shape.features(point), self.coefficients)
        most = _EXACT_ERROR / 4 * max(observation.head_forward_bytes, 1)
        return bool(np.abs(thought - row_of(observation)).max() <= most)

    @property
    def typical_saved(self) -> Floats:
        """What each run saves at a middling size."""
        table = self.values[:, :-_OF_STEP].reshape(len(self.values), -1, len(_QUANTITIES))
        saved: Floats = table[:, :, _SAVED].mean(0)
        return saved

    def inside(self, size: InputSize) -> bool:
        """Whether a size is of just this shape and between the smallest and the largest seen."""
        if not self.shape.describes(size):
            return False
        point = self.shape.point(size)
        return _at_most(self._low, point) and _at_most(point, self._high)

    def _within_neighbours(self, point: Sequence[float], row: Floats) -> Floats:
        """No more than at any larger size seen, no less than at any smaller one: memory grows, as a
        rule.

        Where sizes seen lie close together, a fit may bend far away from them.
        """
        if self._ladder is not None:
            return self._ladder.within(point[0], row)
        larger = [i for i, other in enumerate(self.points) if _at_most(point, other)]
        smaller = [i for i, other in enumerate(self.points) if _at_most(other, point)]
        if larger:
            row = np.where(self._capped, np.minimum(row, self.values[larger].min(0)), row)
        return np.maximum(row, self.values[smaller].max(0)) if smaller else row

    def _rising(self) -> npt.NDArray[np.bool_]:
        """Which quantities were never more at a smaller size.

        Others are: what is left after the blocks, above what was there before them.
        """
        points, rising = np.array(self.points), np.ones(self.values.shape[1], bool)
        for point, row in zip(points, self.values, strict=True):
            larger = (points >= point).all(1)
            rising &= row <= self.values[larger].min(0)
        return rising

    def _mind_kinks(self, point: Sequence[float], row: Floats) -> Floats:
        """What a kinked quantity is at most, as far as observations tell."""
        ladder = self._ladder
        if ladder is not None and point[0] <= ladder.at[0]:
            least = most = ladder.values[0]
        elif ladder is not None and (neighbours := ladder.neighbours(point[0])) is not None:
            chord, least = neighbours
            most = np.maximum(row, chord)
        else:
            return np.where(self.kinked, self._upper_end(row), row)
        safe = np.where(self._taken_off, np.minimum(row, least), most)
        return np.where(self.kinked, safe, row)

    def _fitted(self) -> Floats:
        """What the fit says of the sizes that it was made from."""
        features = np.array([self.shape.features(point) for point in self.points])
        fitted: Floats = features @ self.coefficients
        return fitted

    def _upper_end(self, row: Floats) -> Floats:
        """The most that observations give reason to expect, where they scatter about the fit; of
        what is taken off, the least."""
        fitted = self._fitted()
        above, below = np.maximum(self.values - fitted, 0), np.maximum(fitted - self.values, 0)
        share = (above / np.maximum(fitted, 1)).max(0)
        upper = row + np.minimum(np.abs(row) * share, above.max(0))
        safe: Floats = np.where(self._taken_off, row - below.max(0), upper)
        return safe

    def _profile(self, size: InputSize, row: Floats) -> Profile:
        numbers: list[int] = row.round().astype(np.int64).tolist()
        of_step, width = numbers[-_OF_STEP:], len(_QUANTITIES)
        runs = []
        for k, (fixed, base, slope) in enumerate(zip(self.fixed, *self.times.lines, strict=True)):
            *costs, given = numbers[k * width : (k + 1) * width]
            seconds = base + slope * costs[_SAVED]
            runs.append(RunCost._make((*costs, round(seconds * 1e9), fixed, given)))
        return Profile(size, tuple(runs), *of_step)


@dataclass(frozen=True, slots=True)
class _Ladder:
    """Sizes seen that differ in one dimension, the smallest first, and what they say of others."""

    at: list[int]
    values: Floats
    floor: Floats
    """The most that was seen up to each size."""
    ceiling: Floats
    """The least that was seen from each size on; nothing, of quantities that have no cap."""

    @classmethod
    def of(cls, at: Sequence[int], values: Floats, capped: npt.NDArray[np.bool_]) -> _Ladder:
        order = sorted(range(len(at)), key=at.__getitem__)
        values = values[order]
        ceiling = np.minimum.accumulate(values[::-1], axis=0)[::-1].copy()
        ceiling[:, ~capped] = np.inf
        return cls([at[i] for i in order], values, np.maximum.accumulate(values, axis=0), ceiling)

    def within(self, x: float, row: Floats) -> Floats:
        """The row, no lower than at any smaller size, no higher than at any larger one."""
        larger, smaller = bisect_left(self.at, x), bisect_right(self.at, x) - 1
        if larger < len(self.at):
            row = np.minimum(row, self.ceiling[larger])
        return np.maximum(row, self.floor[smaller]) if smaller >= 0 else row

    def neighbours(self, x: float) -> tuple[Floats, Floats] | None:
        """What lies on the line between the next smaller and the next larger size, and the least at
        both, if both are."""
        right = bisect_left(self.at, x)
        if not 0 < right < len(self.at):
            return None
        share = (x - self.at[right - 1]) / (self.at[right] - self.at[right - 1])
        low, high = self.values[right - 1], self.values[right]
        return low + share * (high - low), np.minimum(low, high)


def _at_most(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))


def row_of(o: StepObservation) -> list[int]:
    row = [number for run in o.runs for number in _quantities(run.cost())]
    head = o.head_forward_bytes, o.head_backward_bytes
    return [*row, *head, o.tail_bytes, o.prelude_bytes or 0]


def _leave_one_out(features: Floats, values: Floats, coefficients: Floats) -> Floats:
    """What each observation would be predicted as by a fit of all the others."""
    projection = features @ np.linalg.pinv(features)
    leverage = np.clip(np.diag(projection), 0, 1 - 1e-6)
    residual: Floats = (values - features @ coefficients) / (1 - leverage)[:, None]
    return values - residual


def _all_peaks(fixed: Sequence[bool], rows: Floats) -> Floats:
    """The peaks, all kept and all recomputed, of each observation if its values were these.

    As `timeline.peak` has them, for all observations at once.
    """
    rows = np.maximum(rows, 0).round()
    head = rows[:, -_OF_STEP:-2].max(1)
    tail = rows[:, -2]
    kept, highest, strictest = np.zeros(len(rows)), np.ones(len(rows)), np.ones(len(rows))
    for k, stays in enumerate(fixed):
        at = k * len(_QUANTITIES)
        start, forward, entry, saved, spike, back, out, idle, gap = rows[:, at : at + 9].T
        again = np.maximum(forward, gap)
        if not stays:
            again = np.maximum(again, entry + np.maximum(spike, saved + back))
        strictest = np.maximum(strictest, again)
        if stays:
            highest = np.maximum(highest, kept + again)
            continue
        need = np.maximum(start + spike, entry - idle + saved + back)
        highest = np.maximum(highest, kept + np.maximum(need, gap))
        kept = kept + np.maximum(0, saved - out - idle)
    all_kept = np.maximum(np.maximum(highest, kept + head), tail)
    return np.stack([all_kept, np.maximum(np.maximum(strictest, head), tail)], axis=1)
