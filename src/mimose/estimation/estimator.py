"""Learn from observations; tell what any input size costs.

A size that was seen can be told at once, others by the fit of all of them (`fit.py`), once its own
error says that it can be believed.

What was learned may cease to be true (a layer unfrozen, another kernel): an observation that
contradicts it makes all older ones void. If that happens again and again, or if many observations
give no fit, then memory depends on more than the size (on proposals, on routing): such a model is
noisy, and predictions are the upper end of what was seen.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mimose.costs import FINEST, InputSize, Pattern, Profile, StepObservation, peak
from mimose.estimation.fit import REACH, Fit, row_of
from mimose.estimation.times import Times, with_shared_times

_CONTRADICTION = 0.04
"""The difference from what was predicted, as a share of the peak, that makes old observations
void."""
_SOON = 8
"""If two contradictions are no more than this many observations apart, the model is noisy."""
_CONFIRMED = 16
"""Planned steps that went as usual, to count as one observation in this."""
_ENOUGH = 12
"""Observations after which a fit that is still not fair is taken for noise."""
_MOST_SIZES = 64
_MOST_TOLD = 512


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
    def observed(self) -> int:
        """How many observations there were since what was known became void."""
        return self.version - self._void_at

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
            if void:
                self.forget()
        former = self._seen.pop(observation.size, None)
        if former is not None and self.noisy:
            observation = former.joined(observation)
        self._seen[observation.size] = observation
        if len(self._seen) > _MOST_SIZES:
            self._drop_one()
        before = self._fit
        if before is not None and former is not None and row_of(former) == row_of(observation):
            self._fit = replace(before, times=Times.of(self.observations))  # no more is new
        else:
            self._fit = Fit.of(self.observations)
        self.keeps_time = (
            before is not None
            and self._fit is not None
            and self._fit.times.much_like(before.times, before.typical_saved)
        )
        self._told.clear()
        self.version += 1
        return void

    def forget(self) -> None:
        """What was seen is void; whether it is noisy is not."""
        self._seen, self._fit, self._void_at = {}, None, self.version
        self._told.clear()

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
        former, self._fit.times = self._fit.times, Times.of(self.observations)
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

    def extrapolate(self, size: InputSize) -> tuple[Profile, float] | None:
        """The profile at a size beyond those seen, and how far off its peaks may be, as a share."""
        return None if self._fit is None or self.noisy else self._fit.extrapolate(size)

    def covers(self, size: InputSize) -> bool:
        """Whether a size lies between those seen."""
        return size in self._seen or (self._fit is not None and self._fit.covers(size))

    def below(self, size: InputSize) -> bool:
        """Whether a size is smaller than all seen in one of several dimensions."""
        return size not in self._seen and self._fit is not None and self._fit.below(size)

    def far_beyond(self, size: InputSize) -> bool:
        """Whether a size is so much larger than all seen that its prediction has to be generous."""
        return size not in self._seen and self._fit is not None and self._fit.beyond(size) > REACH

    def bound(self, size: InputSize) -> Profile | None:
        """A profile that is no lower than that of `size`: memory grows with size.

        What is left before and after the blocks may fall: it is no higher than at a smaller one.
        """
        larger = [seen for other, seen in self._seen.items() if size <= other]
        if not larger:
            return None
        bound = min(larger, key=_volume).profile()
        smaller = [seen for other, seen in self._seen.items() if other <= size]
        if not smaller:
            return bound
        below = max(smaller, key=_volume).profile()
        return replace(
            bound,
            head_forward=max(bound.head_forward, below.head_forward),
            head_backward=max(bound.head_backward, below.head_backward),
            tail=max(bound.tail, below.tail),
        )

    def sharing(self, size: InputSize) -> InputSize:
        """The size whose plan `size` may share: itself, or one that is hardly larger."""
        if max(size.dims, default=0) < FINEST or self._fit is None or not self.ready:
            return size
        return size.rounded_up(self._fit.shape.varying)

    def _contradicts(self, observation: StepObservation) -> bool:
        """Whether a step was so far from what it should have been that nothing older counts."""
        size = observation.size
        known = size in self._seen or (self._fit is not None and self._fit.inside(size))
        expected = self.predict(size) if known else None
        if expected is None:
            return False
        pairs = zip(_peaks(expected), _peaks(observation.profile()), strict=True)
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
    return sum(run.saved_bytes for run in seen.runs)


def _peaks(profile: Profile) -> tuple[float, float]:
    runs = len(profile.runs)
    return max(1, peak(profile, [False] * runs)), max(1, peak(profile, [True] * runs))
