"""All that was learned of a model: an estimator for each way in which its steps run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mimose.adaptation import Adaptation
from mimose.estimator import Estimator
from mimose.inputs import InputSize, Layout
from mimose.kin import Kin
from mimose.observations import Pattern, StepObservation
from mimose.timeline import Profile

_ENOUGH = 12
"""Observations after which sizes that cannot be predicted are no longer observed for their own
sake, if a larger one tells enough."""
_ALL = 1 << 62
"""Gradients of whatever has none yet."""
_MOST_STRANGERS = 2
"""How often runs may be taken for alike that are not, before all are looked at for good."""


class Knowledge:
    """Estimators by input layout and pattern of runs.

    Most models have one of each. A contrastive loss runs its blocks twice a step, a GAN now once
    and now twice: of several patterns the longest is planned for, since a step's pattern is not
    known at its start.
    """

    def __init__(self) -> None:
        self._estimators: dict[tuple[Layout, Pattern], Estimator] = {}
        self._preferred: dict[Layout, Estimator] = {}
        self._largest: dict[Layout, InputSize] = {}
        self._born: dict[Pattern, tuple[int, ...]] = {}
        """The most gradients that came into being before each run's recompute; and in all."""
        self._kin: dict[tuple[Layout, bool], Kin] = {}
        self._strangers = 0
        self._failed_at: InputSize | None = None
        self.doubts_beyond = False
        """Whether sizes larger than those seen are observed, whatever is predicted of them."""
        self.look_in: int | None = None
        """After how many steps one is observed since something was not as expected; None if all
        was."""
        self.adaptation = Adaptation()
        self.version = 0
        self.mark = object()
        """Another one whenever something else is known than before: what plans from the same
        knowledge share."""

    @property
    def ready(self) -> bool:
        """Whether sizes that were never seen can be predicted."""
        return any(estimator.ready for estimator in self._estimators.values())

    @property
    def error(self) -> float | None:
        """The largest leave-one-out error of the peak, as a share of it."""
        errors = [e.error for e in self._estimators.values() if e.error is not None]
        return max(errors, default=None)

    def reaches(self, size: InputSize) -> bool:
        """Whether it is ready, and no dimension is larger than what was seen."""
        largest = self._largest.get(size.layout)
        return largest is not None and size <= largest and self.ready

    def learn(
        self, observation: StepObservation, *, doubted: bool = False, timed: bool = True
    ) -> bool:
        """Take one more observation in; whether that made what was known before void.

        Only if what was known was in doubt already. If it is not `timed`, something stands in for
        its times until `take_times`.
        """
        if observation.prelude_bytes is None:  # not looked at: what was known of it still holds
            known = self.predict(observation.size)
            observation = replace(observation, prelude_bytes=known.prelude if known else 0)
        self.doubts_beyond = False
        largest = self._largest.get(observation.size.layout, observation.size)
        self._largest[observation.size.layout] = largest.joined(observation.size)
        key = (observation.size.layout, observation.pattern)
        if key not in self._estimators:
            self._estimators[key] = Estimator(observation.pattern)
        as_expected = not doubted and self._estimators[key].expects(observation)
        void = self._estimators[key].learn(observation, doubted=doubted)
        as_expected &= not timed or self._estimators[key].keeps_time
        if void or self.has_failed_at(observation.size):
            self._failed_at = None
        if void:
            self._estimators = {key: self._estimators[key]}
            self._preferred, self._largest = {}, {key[0]: observation.size}
            self._kin = {}
        self._prefer(observation.size.layout)
        if observation.gradients_born:
            self.note_born(observation.pattern, observation.born_bytes, observation.all_born_bytes)
        self.version += 1
        if not as_expected:
            self.mark = object()
        return void

    def take_times(self, observation: StepObservation) -> None:
        """The times of an observation that was learned without them are known now.

        No more is: it does not count as another one.
        """
        estimator = self._estimators.get((observation.size.layout, observation.pattern))
        if estimator is not None and estimator.take_times(observation):
            self.mark = object()

    def note_born(
        self, pattern: Pattern, born_bytes: Sequence[int], all_born_bytes: int | None
    ) -> None:
        """Gradients came into being in this order: exact, whatever else the step was like.

        Where some existed already there were fewer, so the most that was seen counts.
        """
        now = (*born_bytes, _ALL if all_born_bytes is None else all_born_bytes)
        known = self._born.get(pattern)
        self._born[pattern] = tuple(map(max, known, now)) if known else now

    def note_kin(self, seen: StepObservation) -> None:
        """A step that was seen whole shows which runs are alike."""
        key = (seen.size.layout, seen.gradients_born)
        kin, known = Kin.among(seen), self._kin.get(key)
        if known is None or known.seen.pattern != seen.pattern or len(kin) >= len(known):
            self._kin[key] = kin

    def not_alike(self, size: InputSize) -> None:
        """What was taken for alike was not in a step of this size: the next is seen whole."""
        self._strangers += 1
        self._kin = {key: kin for key, kin in self._kin.items() if key[0] != size.layout}

    def kin_for(self, size: InputSize, *, born: bool = True) -> Kin | None:
        """The runs that tell of each other in a step of this size, if any are known to.

        In one in which gradients are `born`, or not.
        """
        kin, estimator = self._kin.get((size.layout, born)), self._estimator_for(size)
        if kin is None or self._strangers >= _MOST_STRANGERS:
            return None
        if estimator is not None and (estimator.noisy or estimator.pattern != kin.seen.pattern):
            return None
        return kin

    def seen_like(self, size: InputSize) -> list[StepObservation]:
        """What counts, of steps laid out like this one."""
        estimator = self._estimator_for(size)
        return [] if estimator is None else estimator.observations

    def predict(self, size: InputSize) -> Profile | None:
        """The profile at `size`, without born gradients; None where too little is known."""
        estimator = self._estimator_for(size)
        return None if estimator is None else estimator.predict(size)

    def doubtful(self, size: InputSize) -> bool:
        """Whether a step of this size had better be watched: noise, or beyond what was seen."""
        estimator = self._estimator_for(size)
        return estimator is None or estimator.noisy or not estimator.covers(size)

    def beyond(self, size: InputSize) -> bool:
        """Whether a size is larger than all that were seen."""
        estimator = self._estimator_for(size)
        return estimator is not None and not estimator.covers(size)

    def far_beyond(self, size: InputSize) -> bool:
        """Whether it is so much larger that its prediction has to be generous."""
        estimator = self._estimator_for(size)
        return estimator is not None and estimator.far_beyond(size)

    def bound(self, size: InputSize) -> Profile | None:
        """A profile that is no lower than that of `size`, if a larger one was seen."""
        estimator = self._estimator_for(size)
        return None if estimator is None else estimator.bound(size)

    def curious(self, size: InputSize) -> bool:
        """Whether a few more observations would make it ready for such sizes."""
        estimator = self._estimator_for(size)
        return estimator is None or not (estimator.ready or estimator.observed >= _ENOUGH)

    def failed(self, size: InputSize) -> None:
        """A step of this size ran out of memory: doubted until one as large was observed."""
        self._failed_at, self.look_in = size, 0
        self.adaptation.failed()

    def wants_to_look(self, size: InputSize) -> bool:
        """Whether the coming step of this size is to be observed, whatever is known of it."""
        now = self.look_in == 0
        if self.look_in:
            self.look_in -= 1
        return now or self.has_failed_at(size)

    def has_failed_at(self, size: InputSize) -> bool:
        """Whether a step ran out of memory that was no larger, and none as large was observed."""
        return self._failed_at is not None and self._failed_at <= size

    def pattern_for(self, size: InputSize) -> Pattern | None:
        """The runs that a step of this size is expected to have."""
        estimator = self._estimator_for(size)
        return None if estimator is None else estimator.pattern

    def sharing(self, size: InputSize) -> tuple[InputSize, Pattern | None]:
        """The size whose plan `size` may share, itself or one that is hardly larger; and the runs
        that a step of it is expected to have."""
        estimator = self._preferred.get(size.layout)
        return (size, None) if estimator is None else (estimator.sharing(size), estimator.pattern)

    def born_bytes(self, pattern: Pattern, missing_bytes: int) -> tuple[tuple[int, ...], int]:
        """Gradients that will be born before each run's recompute, and in all, if so much is
        missing now."""
        if not missing_bytes:
            return (0,) * len(pattern), 0
        known = self._born.get(pattern)
        if known is None:  # never seen: all of them, at once
            return (missing_bytes,) * len(pattern), missing_bytes
        *before, in_all = [min(born, missing_bytes) for born in known]
        return tuple(before), in_all

    def peaked(self, size: InputSize, predicted_rise: int, real_rise: int | None) -> None:
        """A step rose so far above its start; None if nobody could see.

        Beyond the range seen a difference says nothing of what is known; it is a reason to observe.
        """
        estimator = self._estimator_for(size)
        if real_rise is None:
            self.adaptation.peaked_unseen()
        elif estimator is not None and estimator.covers(size):
            self.adaptation.peaked(predicted_rise, real_rise)
            if not self.adaptation.in_doubt:
                estimator.confirmed()

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone, for files."""
        born = [[list(map(list, pattern)), list(b)] for pattern, b in self._born.items()]
        return {"observations": [o.to_plain() for o in self._observations()], "born": born}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], blocks: int | None = None) -> Knowledge:
        """What `to_plain` gave, of a model of so many blocks, learned again."""
        knowledge = cls()
        for observation in plain["observations"]:
            knowledge.learn(StepObservation.from_plain(observation, blocks))
        for pattern, born in plain["born"]:
            runs = tuple((int(block), int(nth)) for block, nth in pattern)
            numbers = [*map(int, born)]
            if len(numbers) == len(runs):  # as older versions wrote it
                numbers.append(_ALL)
            if len(numbers) != len(runs) + 1:
                raise ValueError(f"gradients of {len(born)} runs where there are {len(runs)}")
            knowledge.note_born(runs, numbers[:-1], numbers[-1])
        return knowledge

    def _observations(self) -> Iterable[StepObservation]:
        for estimator in self._estimators.values():
            yield from estimator.observations

    def _estimator_for(self, size: InputSize) -> Estimator | None:
        return self._preferred.get(size.layout)

    def _prefer(self, layout: Layout) -> None:
        fitting = [e for (of, _), e in self._estimators.items() if of == layout]
        self._preferred[layout] = max(fitting, key=lambda e: (len(e.pattern), len(e)))
