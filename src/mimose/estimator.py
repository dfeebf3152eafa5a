"""Fit what was observed; predict a profile for any input size.

Bytes are polynomials of the shape: a constant plus the batch times monomials of the other sizes up
to degree two. The fit is one linear least-squares problem for all runs and all quantities at once.

Levels follow such polynomials exactly. Peaks are the largest of several of them, so they have kinks
that no polynomial follows; but they stay convex, and for a convex function the chord between two
observed sizes is never too low. So where a quantity's own leave-one-out error says that it has
kinks, the larger of fit and chord is taken.

What was learned may cease to be true (a layer unfrozen, another kernel): an observation that
contradicts it makes all older ones void. If that happens again and again, or if many observations
give no fit, then memory depends on more than the size (on proposals, on routing): such a model is
noisy, and predictions are the upper end of what was seen.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from mimose.inputs import FINEST, InputSize
from mimose.observations import Pattern, StepObservation
from mimose.reach import Line
from mimose.shapes import Shape
from mimose.timeline import Profile, RunCost, peak

_Floats = npt.NDArray[np.float64]

_QUANTITIES = (
    *("start", "forward", "entry", "saved", "spike", "back", "out_saved", "in_idle"),
    "input",
)
_quantities = attrgetter(*_QUANTITIES)
_SAVED = _QUANTITIES.index("saved")
_OF_STEP = 4
"""How many quantities are of the step, not of a run: the head's two, the tail, the prelude."""
_FAIR_ERROR = 0.02
"""The leave-one-out error of the peak, as a share of it, at which predictions are trusted."""
_TO_DOUBT = 4
"""Observations it takes to doubt that the first dimension is the batch."""
_EXACT_ERROR = 0.001
"""The error, as a share of the peak, up to which a quantity counts as an exact polynomial."""
_CONTRADICTION = 0.04
"""The difference from what was predicted, as a share of the peak, that makes old knowledge void."""
_SOON = 8
"""If two contradictions are no more than this many observations apart, the model is noisy."""
_CONFIRMED = 16
"""Planned steps that went as usual, to count as one observation in this."""
_ENOUGH = 12
"""Observations after which a fit that is still not fair is taken for noise."""
_REACH = 0.02
"""How far beyond the largest size seen predictions go, as a share of it."""
_EXACT_REACH = 0.1
"""The same for a fit without a visible error."""
_EVEN, _MUCH = 0.02, 1.3
"""How far the times of runs may move, each against the others and all together, before plans are
made anew."""
_MOST_SIZES = 64
_MOST_TOLD = 512


class Estimator:
    """Learns from observations of one pattern of runs and one layout of inputs."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.version = 0
        self._seen: dict[InputSize, StepObservation] = {}
        self._fit: _Fit | None = None
        self._contradicted_at = -_SOON
        self._confirmed = 0
        self._varies = False
        self._told: dict[InputSize, Profile] = {}
        """What was predicted from all that is known by now."""
        self.keeps_time = False
        """Whether the latest observation has left times about as they were."""

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def observations(self) -> list[StepObservation]:
        """What counts, the oldest first."""
        return list(self._seen.values())

    @property
    def ready(self) -> bool:
        """Whether sizes that were never seen can be predicted."""
        return self._fit is not None and (self._fit.fair or self.noisy)

    @property
    def noisy(self) -> bool:
        """Whether memory depends on more than the size."""
        unfit = self._fit is not None and not self._fit.fair and len(self) >= _ENOUGH
        return self._varies or unfit

    @property
    def error(self) -> float | None:
        """The leave-one-out error of the peak, as a share of it."""
        return None if self._fit is None else self._fit.error

    def learn(self, observation: StepObservation, *, doubted: bool = False) -> bool:
        """Take one more observation in; of a size seen before, the newer one counts.

        If what was known of its size was in doubt already, older observations may become void:
        whether they did.
        """
        observation = with_shared_times(observation)
        void = False
        if doubted and not self.noisy and self._contradicts(observation):
            now = self.version + self._confirmed // _CONFIRMED
            self._varies = now - self._contradicted_at <= _SOON
            self._contradicted_at = now
            void = not self._varies
            self._seen = {} if void else self._seen
        former = self._seen.pop(observation.size, None)
        if former is not None and self.noisy:
            observation = former.joined(observation)
        self._seen[observation.size] = observation
        if len(self._seen) > _MOST_SIZES:
            self._drop_one()
        before = self._fit
        if before is not None and former is not None and _row(former) == _row(observation):
            self._fit = replace(before, times=_Times.of(self.observations))  # no more is new
        else:
            self._fit = _Fit.of(self.observations)
        self.keeps_time = (
            before is not None
            and self._fit is not None
            and self._fit.times.much_like(before.times, before.typical_saved)
        )
        self._told.clear()
        self.version += 1
        return void

    def expects(self, observation: StepObservation) -> bool:
        """Whether the fit says just this of a size that it was not made from."""
        plain = self.ready and not self.noisy
        return plain and self._fit is not None and self._fit.expects(observation)

    def take_times(self, observation: StepObservation) -> bool:
        """What was learned of this size gets these times; whether plans may be others now."""
        seen = self._seen.get(observation.size)
        if seen is None:
            return False
        self._seen[observation.size] = seen.timed_as(with_shared_times(observation))
        self._told.clear()
        if self._fit is None:
            return True
        former, self._fit.times = self._fit.times, _Times.of(self.observations)
        return not self._fit.times.much_like(former, self._fit.typical_saved)

    def confirmed(self) -> None:
        """A planned step went as usual."""
        self._confirmed += 1

    def predict(self, size: InputSize) -> Profile | None:
        """The profile at `size`; None where nothing that was seen tells enough.

        A size that was seen can be told at once. Others need a fit that its own leave-one-out error
        confirms; without one, `bound` may still say enough.
        """
        told = self._told.get(size)
        if told is not None:
            return told
        seen, profile = self._seen.get(size), None
        if seen is not None and not (self.noisy and self._fit is not None):
            profile = seen.profile()
        elif self._fit is not None and self.ready:
            profile = self._fit.predict(size)
        if profile is not None:
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told[size] = profile
        return profile

    def covers(self, size: InputSize) -> bool:
        """Whether a size lies between those seen."""
        return size in self._seen or (self._fit is not None and self._fit.covers(size))

    def far_beyond(self, size: InputSize) -> bool:
        """Whether a size is so much larger than all seen that its prediction has to be generous."""
        return size not in self._seen and self._fit is not None and self._fit.beyond(size) > _REACH

    def bound(self, size: InputSize) -> Profile | None:
        """A profile that is no lower than that of `size`: memory grows with size."""
        larger = [other for other in self._seen if size <= other]
        if not larger:
            return None
        smallest = min(larger, key=lambda other: sum(r.saved_bytes for r in self._seen[other].runs))
        return self._seen[smallest].profile()

    def sharing(self, size: InputSize) -> InputSize:
        """The size whose plan `size` may share: itself, or one that is hardly larger."""
        if max(size.dims, default=0) < FINEST or self._fit is None or not self.ready:
            return size
        return size.rounded_up(self._fit.shape.varying)

    def line(self, size: InputSize) -> Line | None:
        """The sizes that differ from this one in the one dimension that varies; if it is one."""
        fit = self._fit
        if fit is None or not fit.fair or self.noisy or len(fit.shape.symbols) != 1:
            return None
        if not fit.shape.describes(size) or not fit.covers(size):
            return None
        return Line(fit.shape, size, fit.shape.point(size)[0], fit.highest)

    def _contradicts(self, observation: StepObservation) -> bool:
        """Whether a step was so far from what it should have been that nothing older counts."""
        size = observation.size
        known = size in self._seen or (self._fit is not None and self._fit.inside(size))
        expected = self.predict(size) if known else None
        born = observation.gradients_born
        if expected is None or any(o.gradients_born != born for o in self._seen.values()):
            return False
        pairs = zip(_peaks(expected), _peaks(observation.profile()), strict=True)
        return any(abs(real - thought) > _CONTRADICTION * real for thought, real in pairs)

    def _drop_one(self) -> None:
        """Forget the size whose neighbours are nearest; not one that marks the range's end."""
        dims = np.array([size.dims for size in self._seen])
        ends = {int(i) for i in (*dims.argmin(0), *dims.argmax(0))}
        volume = {
            size: sum(run.saved_bytes for run in seen.runs) for size, seen in self._seen.items()
        }
        at_end = {size for i, size in enumerate(self._seen) if i in ends}
        order = sorted(volume, key=lambda size: volume[size])
        inner = [i for i in range(1, len(order) - 1) if order[i] not in at_end]
        gap = {i: volume[order[i + 1]] - volume[order[i - 1]] for i in inner}
        del self._seen[order[min(gap, key=lambda i: gap[i])] if gap else order[0]]


@dataclass(slots=True)
class _Fit:
    shape: Shape
    points: list[list[int]]
    """The varying dimensions of each observation."""
    values: _Floats
    """One row an observation, one column a quantity of a run; those of the step come last."""
    coefficients: _Floats
    kinked: npt.NDArray[np.bool_]
    error: float
    times: _Times
    fixed: tuple[bool, ...]
    _low: list[int] = field(init=False)
    _high: list[int] = field(init=False)
    _kinks: bool = field(init=False)
    _ladder: _Ladder | None = field(init=False)

    def __post_init__(self) -> None:
        columns = list(zip(*self.points, strict=True))
        self._low, self._high = [min(c) for c in columns], [max(c) for c in columns]
        self._kinks = bool(self.kinked.any())
        one = len(columns) == 1
        self._ladder = _Ladder.of(columns[0], self.values, self.kinked) if one else None

    @property
    def highest(self) -> int:
        """The largest size seen, where sizes differ in one dimension."""
        return self._high[0]

    @property
    def fair(self) -> bool:
        return self.error <= _FAIR_ERROR

    @classmethod
    def of(cls, observations: list[StepObservation]) -> _Fit | None:
        """The fit of these, with the dimension for the batch that explains them best."""
        usual, *others = Shape.of([o.size for o in observations]).alternatives()
        best = cls.with_shape(usual, observations)
        if len(observations) >= _TO_DOUBT and (best is None or not best.fair):
            for shape in others:
                fit = cls.with_shape(shape, observations)
                if fit is not None and (best is None or fit.error < best.error):
                    best = fit
        return best

    @classmethod
    def with_shape(cls, shape: Shape, observations: list[StepObservation]) -> _Fit | None:
        points = [shape.point(o.size) for o in observations]
        features = np.array([shape.features(point) for point in points])
        if len(observations) <= features.shape[1]:
            return None
        values = np.array([_row(o) for o in observations], float)
        coefficients, _, rank, _ = np.linalg.lstsq(features, values, rcond=None)
        if rank < features.shape[1]:
            return None
        left_out = _leave_one_out(features, values, coefficients)
        peaks = _all_peaks(observations, values)
        wrong = np.abs(_all_peaks(observations, left_out) - peaks) / peaks
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
            times=_Times.of(observations),
            fixed=tuple(run.fixed for run in observations[-1].runs),
        )

    def predict(self, size: InputSize) -> Profile | None:
        point = self.shape.covering_point(size)
        beyond = self.beyond(size)
        reach = _REACH if self.error > _EXACT_ERROR else _EXACT_REACH
        if point is None or beyond > reach:
            return None
        row: _Floats = np.dot(self.shape.features(point), self.coefficients)
        if not self.fair:
            row = self._upper_end(row)
        else:
            row = self._within_neighbours(point, row)
            if self._kinks:
                row = self._mind_kinks(point, row)
        if beyond > 0:
            row = row * (1 + beyond * 0.5)
            if len(point) == 1:  # a fit of sizes that lie close together may shoot up
                row = np.minimum(row, self.values.max(0) * (1 + beyond) ** 3)
        return self._profile(size, np.maximum(row, 0))

    def covers(self, size: InputSize) -> bool:
        return self.beyond(size) == 0

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
        thought: _Floats = np.dot(self.shape.features(point), self.coefficients)
        most = _EXACT_ERROR / 4 * max(observation.head_forward_bytes, 1)
        return bool(np.abs(thought - _row(observation)).max() <= most)

    @property
    def typical_saved(self) -> _Floats:
        """What each run saves at a middling size."""
        table = self.values[:, :-_OF_STEP].reshape(len(self.values), -1, len(_QUANTITIES))
        saved: _Floats = table[:, :, _SAVED].mean(0)
        return saved

    def inside(self, size: InputSize) -> bool:
        """Whether a size is of just this shape and between the smallest and the largest seen."""
        if not self.shape.describes(size):
            return False
        point = self.shape.point(size)
        return _at_most(self._low, point) and _at_most(point, self._high)

    def _within_neighbours(self, point: Sequence[float], row: _Floats) -> _Floats:
        """No more than at any larger size seen, no less than at any smaller one: memory grows.

        Where sizes seen lie close together, a fit may bend far away from them.
        """
        if self._ladder is not None:
            return self._ladder.within(point[0], row)
        larger = [i for i, other in enumerate(self.points) if _at_most(point, other)]
        smaller = [i for i, other in enumerate(self.points) if _at_most(other, point)]
        if larger:
            row = np.where(self.kinked, row, np.minimum(row, self.values[larger].min(0)))
        return np.maximum(row, self.values[smaller].max(0)) if smaller else row

    def _mind_kinks(self, point: Sequence[float], row: _Floats) -> _Floats:
        """What a kinked quantity is at most, as far as observations tell."""
        if self._ladder is not None:
            if point[0] <= self._ladder.at[0]:
                return np.where(self.kinked, self._ladder.values[0], row)
            chord = self._ladder.chord(point[0])
            if chord is not None:
                return np.where(self.kinked, np.maximum(row, chord), row)
        fitted = self._fitted()
        short = (self.values - fitted) / np.maximum(fitted, 1)
        return np.where(self.kinked, row * (1 + np.maximum(short.max(0), 0)), row)

    def _fitted(self) -> _Floats:
        """What the fit says of the sizes that it was made from."""
        features = np.array([self.shape.features(point) for point in self.points])
        fitted: _Floats = features @ self.coefficients
        return fitted

    def _upper_end(self, row: _Floats) -> _Floats:
        """The most that observations give reason to expect, where they scatter about the fit."""
        fitted = self._fitted()
        above = np.maximum(self.values - fitted, 0)
        by_share = row * (1 + (above / np.maximum(fitted, 1)).max(0))
        upper: _Floats = np.minimum(by_share, row + above.max(0))
        return upper

    def _profile(self, size: InputSize, row: _Floats) -> Profile:
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
    values: _Floats
    floor: _Floats
    """The most that was seen up to each size."""
    ceiling: _Floats
    """The least that was seen from each size on; nothing, of quantities with kinks."""

    @classmethod
    def of(cls, at: Sequence[int], values: _Floats, kinked: npt.NDArray[np.bool_]) -> _Ladder:
        order = sorted(range(len(at)), key=at.__getitem__)
        values = values[order]
        ceiling = np.minimum.accumulate(values[::-1], axis=0)[::-1].copy()
        ceiling[:, kinked] = np.inf
        return cls([at[i] for i in order], values, np.maximum.accumulate(values, axis=0), ceiling)

    def within(self, x: float, row: _Floats) -> _Floats:
        """The row, no lower than at any smaller size, no higher than at any larger one."""
        larger, smaller = bisect_left(self.at, x), bisect_right(self.at, x) - 1
        if larger < len(self.at):
            row = np.minimum(row, self.ceiling[larger])
        return np.maximum(row, self.floor[smaller]) if smaller >= 0 else row

    def chord(self, x: float) -> _Floats | None:
        """What lies on the line between the next smaller and the next larger size, if both are."""
        right = bisect_left(self.at, x)
        if not 0 < right < len(self.at):
            return None
        share = (x - self.at[right - 1]) / (self.at[right] - self.at[right - 1])
        low, high = self.values[right - 1], self.values[right]
        between: _Floats = low + share * (high - low)
        return between


@dataclass(frozen=True, slots=True)
class _Times:
    """Recompute time as a line in the bytes that a run saves."""

    base: _Floats
    slope: _Floats
    lines: tuple[list[float], list[float]]
    """Both as plain numbers."""

    @classmethod
    def of(cls, observations: Sequence[StepObservation]) -> _Times:
        saved = np.array([[run.saved_bytes for run in o.runs] for o in observations], float)
        seconds = np.array([[run.seconds for run in o.runs] for o in observations])
        deviation = saved - saved.mean(0)
        spread = (deviation**2).sum(0)
        rise = (deviation * (seconds - seconds.mean(0))).sum(0)
        slope = np.maximum(np.divide(rise, spread, out=np.zeros_like(rise), where=spread > 0), 0)
        base = np.maximum(seconds.mean(0) - slope * saved.mean(0), 0)
        return cls(base, slope, (base.tolist(), slope.tolist()))

    def at(self, saved: _Floats) -> _Floats:
        return self.base + self.slope * saved

    def much_like(self, other: _Times, saved: _Floats) -> bool:
        """Whether these are about the same, and for all runs in the same proportion.

        Then what was the least time to recompute by the one still is by the other.
        """
        ours, theirs = self.at(saved), other.at(saved)
        if not (ours > 0).all() or not (theirs > 0).all():
            return False
        scale = ours.sum() / theirs.sum()
        even = np.abs(ours / (scale * theirs) - 1).max() <= _EVEN
        return bool(even) and 1 / _MUCH <= scale <= _MUCH


def _at_most(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))


def with_shared_times(observation: StepObservation) -> StepObservation:
    """The same, with the median time for all runs that save the same: copies of one block."""
    groups: dict[int, list[int]] = {}
    for k, run in enumerate(observation.runs):
        near = (at for at in groups if abs(at - run.saved_bytes) <= 0.005 * at)
        groups.setdefault(next(near, run.saved_bytes), []).append(k)
    runs = list(observation.runs)
    for members in groups.values():
        median = statistics.median(runs[k].seconds for k in members)
        for k in members:
            runs[k] = replace(runs[k], seconds=median)
    return replace(observation, runs=tuple(runs))


def _row(o: StepObservation) -> list[int]:
    row = [number for run in o.runs for number in _quantities(run.cost())]
    head = o.head_forward_bytes, o.head_backward_bytes
    return [*row, *head, o.tail_bytes, o.prelude_bytes or 0]


def _leave_one_out(features: _Floats, values: _Floats, coefficients: _Floats) -> _Floats:
    """What each observation would be predicted as by a fit of all the others."""
    projection = features @ np.linalg.pinv(features)
    leverage = np.clip(np.diag(projection), 0, 1 - 1e-6)
    residual: _Floats = (values - features @ coefficients) / (1 - leverage)[:, None]
    return values - residual


def _all_peaks(observations: Sequence[StepObservation], rows: _Floats) -> _Floats:
    """The peaks, all kept and all recomputed, of each observation if its values were these.

    As `timeline.peak` has them, for all observations at once.
    """
    rows = np.maximum(rows, 0).round()
    head = rows[:, -_OF_STEP:-2].max(1)
    tail = rows[:, -2]
    kept, highest, strictest = np.zeros(len(rows)), np.ones(len(rows)), np.ones(len(rows))
    for k, run in enumerate(observations[-1].runs):
        at = k * len(_QUANTITIES)
        start, forward, entry, saved, spike, back, out, idle = rows[:, at : at + 8].T
        again = forward
        if not run.fixed:
            again = np.maximum(forward, entry + np.maximum(spike, saved + back))
        strictest = np.maximum(strictest, again)
        if run.fixed:
            highest = np.maximum(highest, kept + again)
            continue
        need = np.maximum(start + spike, entry - idle + saved + back)
        highest = np.maximum(highest, kept + need)
        kept = kept + np.maximum(0, saved - out - idle)
    all_kept = np.maximum(np.maximum(highest, kept + head), tail)
    return np.stack([all_kept, np.maximum(np.maximum(strictest, head), tail)], axis=1)


def _peaks(profile: Profile) -> tuple[float, float]:
    runs = len(profile.runs)
    return max(1, peak(profile, [False] * runs)), max(1, peak(profile, [True] * runs))
