"""Learn from observations of one pattern of runs, and predict the costs of any input size.

The prediction for an observed size is its observation. Other sizes are predicted by a fit of all
observations (`fit.py`). A prediction is trusted where the observations of similar sizes predict
each other well.

Costs may change (another kernel is chosen, a module is replaced): an observation that contradicts
the predictions voids all older ones. If that happens repeatedly, or if many observations give no
fit, memory depends on more than the input size (on proposals, on routing). Such a model is called
noisy, and its predictions are upper bounds of what was observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mimose.costs import InputSize, Pattern, Profile, RunCost, StepObservation
from mimose.estimation.fit import Fit
from mimose.estimation.prediction import Prediction, State
from mimose.estimation.proportions import Proportions
from mimose.estimation.rows import BYTES, peaks_of
from mimose.estimation.times import with_shared_times

_CONTRADICTION = 0.04
"""The deviation from the predicted peak, as a fraction of the peak, that voids old observations."""
_AGREEMENT = 0.001
"""The deviation from the prediction, as a fraction, up to which plans stay as they are."""
_SOON = 8
"""Two contradictions at most this many observations apart mean that the model is noisy."""
_CONFIRMED = 16
"""This many planned steps that went as predicted count as one observation for `_SOON`."""
_ENOUGH = 12
"""Observations after which a fit that cannot be trusted means that the model is noisy."""
_MOST_SIZES = 64
_MOST_PREDICTIONS = 512
_MOST_SCALING = 4.0
"""The largest factor by which a guess may scale the costs of an observed size."""
_GUESSED = 0.03
"""By how much the peak of a guess, or of an unsupported fit, may be too low, as a fraction."""


class Estimator:
    """The costs of one pattern of runs and one input layout."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.version = 0
        """The number of observations so far."""
        self._seen: dict[InputSize, StepObservation] = {}
        """The observations that count, the oldest first."""
        self._fit: Fit | None = None
        self._contradicted_at = -_SOON
        """When the last contradiction came, counted in observations and confirmed steps."""
        self._contradicted_twice = False
        """Whether two contradictions came soon after each other."""
        self._void_until = 0
        """The version at which older observations became void."""
        self._confirmed_steps = 0
        self.planned_since_observed = 0
        """Steps planned since the last observation."""
        self._predictions: dict[InputSize, Prediction | None] = {}
        self._proportions: Proportions | None = None

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def observations(self) -> list[StepObservation]:
        """The observations that count, the oldest first."""
        return list(self._seen.values())

    @property
    def ready(self) -> bool:
        """Whether sizes that were never observed can be predicted and trusted."""
        return self._fit is not None and (self._fit.trusted or self.noisy)

    @property
    def observed(self) -> int:
        """The number of observations since older ones became void."""
        return self.version - self._void_until

    @property
    def noisy(self) -> bool:
        """Whether memory depends on more than the input size."""
        return self._contradicted_twice or (self.unfit and self.observed >= _ENOUGH)

    @property
    def unfit(self) -> bool:
        """Whether observations do not predict each other, at most sizes."""
        return self._fit is not None and self._fit.supported and not self._fit.trusted

    @property
    def error(self) -> float | None:
        """The leave-one-out error of the peak, as a fraction of the peak."""
        return None if self._fit is None else self._fit.error

    def learn(self, observation: StepObservation, *, doubted: bool = False) -> bool:
        """Learn from an observation; it replaces an older one of the same size.

        If predictions are `doubted`, an observation that contradicts them voids all older ones.
        Returns whether that happened.
        """
        if observation.provisional and self._seen:
            return False
        self._seen = {size: seen for size, seen in self._seen.items() if not seen.provisional}
        observation = with_shared_times(observation)
        void = doubted and not self.noisy and self._contradicts(observation)
        if void:
            void = self._note_contradiction()
        former = self._seen.pop(observation.size, None)
        if former is not None and self.noisy:
            observation = former.joined(observation)
        self._seen[observation.size] = observation
        if len(self._seen) > _MOST_SIZES:
            self._drop_least_informative()
        self._fit = Fit.of(self.observations)
        self._predictions.clear()
        self._proportions = None
        self.version += 1
        self.planned_since_observed = 0
        return void

    def _note_contradiction(self) -> bool:
        """Void all observations, or declare the model noisy. Returns whether they are void."""
        now = self.version + self._confirmed_steps // _CONFIRMED
        self._contradicted_twice = now - self._contradicted_at <= _SOON
        self._contradicted_at = now
        if not self._contradicted_twice:
            self._seen, self._fit, self._void_until = {}, None, self.version
        return not self._contradicted_twice

    def take_times(self, observation: StepObservation) -> None:
        """Use the times of an observation that was learned without them."""
        seen = self._seen.get(observation.size)
        if seen is not None:
            self._seen[observation.size] = seen.timed_as(with_shared_times(observation))
            if self._fit is not None:
                self._fit.take_times(self.observations)
            self._predictions.clear()

    @property
    def proportions(self) -> Proportions:
        """Which costs of its runs have varied together."""
        if self._proportions is None:
            self._proportions = Proportions.of(self.observations)
        return self._proportions

    def confirmed(self) -> None:
        """A planned step went as predicted."""
        self._confirmed_steps += 1

    def predict(self, size: InputSize) -> Prediction | None:
        """The costs of a size; None if it was not observed and is outside the range of the fit."""
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
            return Prediction(self.pattern, seen.profile, State.LEARNING, _GUESSED)
        if seen is not None and not (noisy and fit is not None):
            return Prediction(self.pattern, seen.profile)
        upper_bound = noisy or self.unfit
        profile = None if fit is None else fit.predict(size, upper_bound=upper_bound)
        if profile is None or fit is None:
            return None
        if upper_bound:
            return Prediction(self.pattern, profile, State.SUSPECT)
        if not fit.trusted_at(size):
            least = 0.0 if fit.supported else _GUESSED
            return Prediction(self.pattern, profile, State.LEARNING, max(least, fit.shortfall))
        state = State.TRUSTED if fit.between(size) else State.LEARNING
        return Prediction(self.pattern, profile, state)

    def bound(self, size: InputSize) -> Prediction | None:
        """The costs of the smallest observed size that is larger; None if there is none.

        Memory grows with the size. Only the head and the tail may shrink, so they are the maximum
        of that size and the next smaller one.
        """
        larger = [seen for other, seen in self._seen.items() if size <= other]
        if not larger:
            return None
        profile = min(larger, key=_saved_bytes).profile
        smaller = [seen for other, seen in self._seen.items() if other <= size]
        if smaller:
            below = max(smaller, key=_saved_bytes).profile
            profile = replace(
                profile,
                head_forward=max(profile.head_forward, below.head_forward),
                head_backward=max(profile.head_backward, below.head_backward),
                tail=max(profile.tail, below.tail),
            )
        return Prediction(self.pattern, profile, State.LEARNING, bound_of=profile.size)

    def guess(self, size: InputSize) -> Prediction | None:
        """The costs of the nearest observed size, scaled by the most that memory may grow."""
        if not self._seen:
            return None
        nearest = min(
            self._seen.values(), key=lambda o: (_most_growth(o.size, size), _saved_bytes(o))
        )
        factor = _most_growth(nearest.size, size)
        if factor > _MOST_SCALING:
            return None
        profile = _scaled(nearest.profile, lambda number: math.ceil(number * factor))
        return Prediction(self.pattern, profile, State.UNKNOWN, _GUESSED)

    def extrapolate(self, size: InputSize) -> Prediction | None:
        """The costs of a size beyond those observed, for what-if questions rather than plans."""
        if self._fit is None or self.noisy or (found := self._fit.extrapolate(size)) is None:
            return None
        profile, uncertainty = found
        return Prediction(self.pattern, profile, State.LEARNING, uncertainty)

    def expect(self, size: InputSize) -> Prediction | None:
        """The costs that an observation of this size is expected to have, however uncertain."""
        return self.predict(size) or self.extrapolate(size)

    def covers(self, size: InputSize) -> bool:
        """Whether no dimension of a size exceeds the observed range."""
        return size in self._seen or (self._fit is not None and self._fit.beyond(size) == 0)

    def agrees(self, observation: StepObservation) -> bool:
        """Whether an observation is as predicted, so that plans need not be made again."""
        trusted = self._fit is not None and self._fit.trusted and not self.noisy
        if observation.provisional or not trusted:
            return False
        prediction = self.expect(observation.size)
        if prediction is None:
            return False
        runs = list(zip(prediction.profile.runs, observation.runs, strict=True))
        if any(_possibilities(real) != _possibilities(predicted) for predicted, real in runs):
            return False
        moved = sum(abs(real.saved - predicted.saved) for predicted, real in runs)
        same_runs = moved <= _AGREEMENT * _saved_bytes(observation)
        return same_runs and _deviation(prediction, observation) <= _AGREEMENT

    def _contradicts(self, observation: StepObservation) -> bool:
        """Whether an observation deviates so far from its prediction that older ones are void."""
        size, fit = observation.size, self._fit
        known = size in self._seen or (fit is not None and fit.trusted and fit.inside(size))
        prediction = self.predict(size) if known else None
        return prediction is not None and _deviation(prediction, observation) > _CONTRADICTION

    def _drop_least_informative(self) -> None:
        """Drop the observation whose neighbours are nearest, but not an end of the range."""
        dims = np.array([size.dims for size in self._seen])
        ends = {int(i) for i in (*dims.argmin(0), *dims.argmax(0))}
        saved = {size: _saved_bytes(seen) for size, seen in self._seen.items()}
        at_end = {size for i, size in enumerate(self._seen) if i in ends}
        order = sorted(saved, key=lambda size: saved[size])
        inner = [i for i in range(1, len(order) - 1) if order[i] not in at_end]
        gap = {i: saved[order[i + 1]] - saved[order[i - 1]] for i in inner}
        del self._seen[order[min(gap, key=lambda i: gap[i])] if gap else order[0]]


def _deviation(prediction: Prediction, observation: StepObservation) -> float:
    """How far the observed peaks deviate from the predicted ones, as a fraction."""
    pairs = zip(peaks_of(prediction.profile), peaks_of(observation.profile), strict=True)
    return max(abs(real - predicted) / real for predicted, real in pairs)


def _possibilities(run: RunCost) -> tuple[bool, bool]:
    """What plans can do with a run, besides keeping it."""
    return run.fixed, run.input_movable


def _saved_bytes(observation: StepObservation) -> int:
    """The activations of all runs."""
    return sum(run.saved for run in observation.runs)


def _scaled(profile: Profile, scale: Callable[[int], int]) -> Profile:
    runs = (RunCost._make((*map(scale, run[:BYTES]), *run[BYTES:])) for run in profile.runs)
    return replace(
        profile,
        runs=tuple(runs),
        head_forward=scale(profile.head_forward),
        head_backward=scale(profile.head_backward),
        tail=scale(profile.tail),
    )


def _most_growth(seen: InputSize, size: InputSize) -> float:
    """The most that memory may grow from an observed size to another one, as a factor.

    It is the square of the growth in elements of the input tensor that grows the most.
    """
    pairs = zip(seen.dims, size.dims, strict=True)
    growth = [max(1.0, new / old) if old else math.inf if new else 1.0 for old, new in pairs]
    factor, at = 1.0, 0
    for _, rank in size.layout:
        factor = max(factor, math.prod(share**2 for share in growth[at : at + rank]))
        at += rank
    return factor
