"""Learn from observations; tell what any input size costs.

A size that was observed is told as it was. Others follow from the fit of all of them (`fit.py`). It
can be trusted at sizes beside which observations predict each other well.

What was learned may cease to be true (another kernel, a module that was exchanged): an observation
that contradicts it voids all older ones. If that happens again and again, or if many observations
give no fit, memory depends on more than the size (on proposals, on routing): such a model is noisy,
and predictions are the upper end of what was observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mimose.costs import InputSize, Option, Pattern, Profile, RunCost, StepObservation, peak
from mimose.estimation.fit import Fit
from mimose.estimation.prediction import Prediction, State
from mimose.estimation.proportions import Proportions
from mimose.estimation.rows import BYTES
from mimose.estimation.times import with_shared_times

_CONTRADICTION = 0.04
"""The difference from what was predicted, as a share of the peak, that voids old observations."""
_SOON = 8
"""If two contradictions are no more than this many observations apart, the model is noisy."""
_CONFIRMED = 16
"""Planned steps that went as predicted, to count as one observation in this."""
_ENOUGH = 12
"""Observations after which a fit that is still not fair is taken for noise."""
_MOST_SIZES = 64
_MOST_PREDICTIONS = 512
_MOST_SCALING = 4.0
"""How much more than an observed size another may take to be guessed from it."""
_GUESSED = 0.03
"""By how much a guess may be too low, as a share of its peak."""


class Estimator:
    """Learns from observations of one pattern of runs and one layout of inputs."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.version = 0
        self._seen: dict[InputSize, StepObservation] = {}
        self._fit: Fit | None = None
        self._contradicted_at = -_SOON
        self._void_at = 0
        self._confirmed = 0
        self._varies = False
        self.planned_since = 0
        """Steps that were planned since the last observation."""
        self._predictions: dict[InputSize, Prediction | None] = {}
        self._proportions: Proportions | None = None

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def observations(self) -> list[StepObservation]:
        """What counts, the oldest first."""
        return list(self._seen.values())

    @property
    def ready(self) -> bool:
        """Whether sizes that were never seen can be predicted and trusted."""
        return self._fit is not None and (self._fit.fair or self.noisy)

    @property
    def observed(self) -> int:
        """How many observations there were since older ones became void."""
        return self.version - self._void_at

    @property
    def noisy(self) -> bool:
        """Whether memory depends on more than the size."""
        return self._varies or (self.unfit and self.observed >= _ENOUGH)

    @property
    def unfit(self) -> bool:
        """Whether observations do not predict each other, in most places."""
        return self._fit is not None and not self._fit.fair

    @property
    def error(self) -> float | None:
        """The leave-one-out error of the peak, as a share of it."""
        return None if self._fit is None else self._fit.error

    def learn(self, observation: StepObservation, *, doubted: bool = False) -> bool:
        """Learn from one more observation; of a size seen before, the newer one counts.

        If predictions were in doubt, an observation that contradicts them voids all older ones:
        whether it did.
        """
        if observation.provisional and self._seen:
            return False
        self._seen = {size: seen for size, seen in self._seen.items() if not seen.provisional}
        observation = with_shared_times(observation)
        void = False
        if doubted and not self.noisy and self._contradicts(observation):
            now = self.version + self._confirmed // _CONFIRMED
            self._varies = now - self._contradicted_at <= _SOON
            self._contradicted_at = now
            void = not self._varies
            if void:
                self.forget()
        former = self._seen.pop(observation.size, None)
        if former is not None and self.noisy:
            observation = former.joined(observation)
        self._seen[observation.size] = observation
        if len(self._seen) > _MOST_SIZES:
            self._drop_one()
        self._changed()
        self.version += 1
        self.planned_since = 0
        return void

    def forget(self) -> None:
        """What was seen is void; whether the model is noisy is not."""
        self._seen, self._void_at = {}, self.version
        self._changed()

    def take_times(self, observation: StepObservation) -> None:
        """The times of an observation that was learned without them."""
        seen = self._seen.get(observation.size)
        if seen is not None:
            self._seen[observation.size] = seen.timed_as(with_shared_times(observation))
            if self._fit is not None:
                self._fit.take_times(self.observations)
            self._predictions.clear()

    def _changed(self) -> None:
        self._fit = Fit.of(self.observations) if self._seen else None
        self._predictions.clear()
        self._proportions = None

    @property
    def proportions(self) -> Proportions:
        """Which quantities of its runs have varied together."""
        if self._proportions is None:
            self._proportions = Proportions.of(self.observations)
        return self._proportions

    def confirmed(self) -> None:
        """A planned step went as predicted."""
        self._confirmed += 1

    def predict(self, size: InputSize) -> Prediction | None:
        """What a size costs; None where neither an observation nor the fit tells."""
        try:
            return self._predictions[size]
        except KeyError:
            prediction = self._predict(size)
        if len(self._predictions) >= _MOST_PREDICTIONS:
            self._predictions.clear()
        self._predictions[size] = prediction
        return prediction

    def _predict(self, size: InputSize) -> Prediction | None:
        seen, fit, noisy = self._seen.get(size), self._fit, self.noisy
        if seen is not None and seen.provisional:
            return Prediction(seen.profile, State.LEARNING, _GUESSED)
        if seen is not None and not (noisy and fit is not None):
            return Prediction(seen.profile)
        scattered = noisy or self.unfit
        profile = None if fit is None else fit.predict(size, upper_end=scattered)
        if profile is None or fit is None:
            return None
        if scattered:
            return Prediction(profile, State.SUSPECT)
        if not fit.fair_at(size):
            return Prediction(profile, State.LEARNING, fit.shortfall)
        return Prediction(profile) if fit.between(size) else Prediction(profile, State.LEARNING)

    def bound(self, size: InputSize) -> Prediction | None:
        """The costs of the next larger size: memory grows with size.

        What is left before and after the blocks may fall: it is no higher than at a smaller size.
        """
        larger = [seen for other, seen in self._seen.items() if size <= other]
        if not larger:
            return None
        profile = min(larger, key=_volume).profile
        smaller = [seen for other, seen in self._seen.items() if other <= size]
        if smaller:
            below = max(smaller, key=_volume).profile
            profile = replace(
                profile,
                head_forward=max(profile.head_forward, below.head_forward),
                head_backward=max(profile.head_backward, below.head_backward),
                tail=max(profile.tail, below.tail),
            )
        return Prediction(profile, State.LEARNING, bound_of=profile.size)

    def guess(self, size: InputSize) -> Prediction | None:
        """The costs of the nearest size, scaled by the most that this one may take more."""
        if not self._seen:
            return None
        nearest = min(self._seen.values(), key=lambda o: (_growth(o.size, size), _volume(o)))
        factor = _growth(nearest.size, size)
        if factor > _MOST_SCALING:
            return None
        profile = _scaled(nearest.profile, lambda number: math.ceil(number * factor))
        return Prediction(profile, State.UNKNOWN, _GUESSED)

    def extrapolate(self, size: InputSize) -> Prediction | None:
        """What a size beyond those seen would cost, for questions rather than for plans."""
        told = None if self._fit is None or self.noisy else self._fit.extrapolate(size)
        return None if told is None else Prediction(told[0], State.LEARNING, told[1])

    def covers(self, size: InputSize) -> bool:
        """Whether a size lies between those seen."""
        return size in self._seen or (self._fit is not None and self._fit.covers(size))

    def _contradicts(self, observation: StepObservation) -> bool:
        """Whether a step was so far from its prediction that nothing older counts."""
        size = observation.size
        fit = self._fit
        known = size in self._seen or (fit is not None and fit.fair and fit.inside(size))
        expected = self.predict(size) if known else None
        if expected is None:
            return False
        pairs = zip(_peaks(expected.profile), _peaks(observation.profile), strict=True)
        return any(abs(real - thought) > _CONTRADICTION * real for thought, real in pairs)

    def _drop_one(self) -> None:
        """Forget the size whose neighbours are nearest; not one that marks the range's end."""
        dims = np.array([size.dims for size in self._seen])
        ends = {int(i) for i in (*dims.argmin(0), *dims.argmax(0))}
        volume = {size: _volume(seen) for size, seen in self._seen.items()}
        at_end = {size for i, size in enumerate(self._seen) if i in ends}
        order = sorted(volume, key=lambda size: volume[size])
        inner = [i for i in range(1, len(order) - 1) if order[i] not in at_end]
        gap = {i: volume[order[i + 1]] - volume[order[i - 1]] for i in inner}
        del self._seen[order[min(gap, key=lambda i: gap[i])] if gap else order[0]]


def _volume(seen: StepObservation) -> int:
    """What all its runs save."""
    return sum(run.saved for run in seen.runs)


def _peaks(profile: Profile) -> tuple[int, int]:
    """All kept and all recomputed."""
    kept, recomputed = ([end] * len(profile.runs) for end in (Option.KEEP, Option.RECOMPUTE))
    return max(1, peak(profile, kept)), max(1, peak(profile, recomputed))


def _scaled(profile: Profile, scale: Callable[[int], int]) -> Profile:
    runs = (RunCost._make((*map(scale, run[:BYTES]), *run[BYTES:])) for run in profile.runs)
    return replace(
        profile,
        runs=tuple(runs),
        head_forward=scale(profile.head_forward),
        head_backward=scale(profile.head_backward),
        tail=scale(profile.tail),
    )


def _growth(seen: InputSize, size: InputSize) -> float:
    """By how much a size may take more memory than one that was seen, at most.

    The square of what the elements of a tensor grow by, of the one that grows the most.
    """
    shares = [max(1.0, b / a) if a else math.inf for a, b in zip(seen.dims, size.dims, strict=True)]
    factor, at = 1.0, 0
    for _, rank in size.layout:
        factor = max(factor, math.prod(share**2 for share in shares[at : at + rank]))
        at += rank
    return factor
