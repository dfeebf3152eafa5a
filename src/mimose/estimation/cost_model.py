"""All that was learned of a model: an estimator for each way in which its steps run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mimose.costs import (
    InputSize,
    InStep,
    Layout,
    Pattern,
    Profile,
    Run,
    StepObservation,
    in_one_order,
)
from mimose.estimation.estimator import Estimator
from mimose.estimation.habit import Habit
from mimose.estimation.margin import PredictionMargin
from mimose.estimation.multi_pass import MultiPass
from mimose.estimation.similar_blocks import SimilarBlocks

_ENOUGH = 12
"""Observations after which sizes that cannot be predicted are no longer observed for their own
sake, if a larger one tells enough."""
_ALL = 1 << 62
"""Gradients of whatever has none yet."""
_FEW = 3
"""New plans in which one kind of step may stand in for the other before that is observed; and steps
with passes that have no backward, before these are taken for usual."""
_MOST_STRANGERS = 2
"""How often runs may be taken for alike that are not, before all are looked at for good."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a size costs: a prediction, an upper bound, or an extrapolation."""

    profile: Profile
    at_most_as: InputSize | None = None
    """For an upper bound, the size whose costs these are; None for a prediction."""
    uncertainty: float = 0.0
    """For an extrapolation, how far off its peaks may be, as a share of them."""


class CostModel:
    """Estimators by input layout and pattern of runs, for one of two kinds of step: gradients are
    `born` in it, or added to existing ones.

    The `other` kind stands in where too little is known of this one.

    Most models have one layout and one pattern. A contrastive loss runs its blocks twice a step, a
    GAN now once and now twice: of several patterns the longest is planned for, since a step's
    pattern is not known at its start. The size of such a step is that of all its passes.
    """

    def __init__(self, *, born: bool = True, other: CostModel | None = None) -> None:
        self.born = born
        self._estimators: dict[tuple[Layout, Pattern], Estimator] = {}
        self._preferred: dict[Layout, Estimator] = {}
        self._largest: dict[Layout, InputSize] = {}
        self._groups: dict[Layout, MultiPass] = other._groups if other else {}
        self._born: dict[Pattern, tuple[int, ...]] = {}
        """The most gradients that came into being before each run's recompute; and in all."""
        self.unused: set[Run] = other.unused if other else set()
        """Runs that a loss did not use: plans do not know them."""
        self.retained: Habit = other.retained if other else Habit()
        """Whether graphs outlive their backwards."""
        self.skips: Habit = other.skips if other else Habit()
        """Whether steps leave some of their runs out."""
        self.any_order: bool = other.any_order if other else False
        """Whether blocks have run in more than one order: each may come at any time then."""
        self._later: list[int] = other._later if other else [0]
        self._given_up: Counter[frozenset[Run]] = Counter()
        self._similar: dict[Layout, SimilarBlocks] = {}
        self._strangers = self._stood_in = self._at_ease = 0
        self._failed_at: InputSize | None = None
        self.doubts_beyond = False
        """Whether sizes larger than those seen are observed, whatever is predicted of them."""
        self.look_in: int | None = None
        """After how many steps one is observed since something was not as expected; None if all
        was."""
        self.prediction_margin = PredictionMargin()
        self._version = 0
        self.mark = object()
        """Another one whenever something else is known than before: what plans from the same
        knowledge share."""
        self.other: CostModel = other or CostModel(born=not born, other=self)

    @property
    def later_bytes(self) -> int:
        """What later backwards find beyond the first: gradients that were set aside, say."""
        return self._later[0] if self.retained else 0

    def note_later(self, number_of_bytes: int) -> None:
        """A later backward found so much more."""
        self._later[0] = max(self._later[0], number_of_bytes)

    def of(self, *, born: bool) -> CostModel:
        """What is known of steps in which gradients are born, or of those that add to others."""
        return self if born == self.born else self.other

    @property
    def version(self) -> int:
        """How many observations there were, of both kinds."""
        return self._version + self.other._version

    @property
    def ready(self) -> bool:
        """Whether sizes that were never seen can be predicted, of either kind."""
        return any(estimator.ready for estimator in self._all_estimators())

    @property
    def error(self) -> float | None:
        """The largest leave-one-out error of the peak, as a share of it."""
        errors = [e.error for e in self._all_estimators() if e.error is not None]
        return max(errors, default=None)

    def reaches(self, size: InputSize) -> bool:
        """Whether one kind is ready, and no dimension is larger than what was seen of it."""
        return self._reaches(size) or self.other._reaches(size)

    def _reaches(self, size: InputSize) -> bool:
        largest, estimator = self._largest.get(size.layout), self._preferred.get(size.layout)
        within = largest is not None and size <= largest
        return within and estimator is not None and estimator.ready

    def learn(
        self, observation: StepObservation, *, doubted: bool = False, timed: bool = True
    ) -> bool:
        """Take one more observation in; whether that made what was known before void.

        Only if what was known was in doubt already. If it is not `timed`, something stands in for
        its times until `take_times`.
        """
        if observation.prelude_bytes is None:  # not looked at: what was known of it still holds
            known = self.predict(observation.size) or self.other.predict(observation.size)
            observation = replace(observation, prelude_bytes=known.prelude if known else 0)
        if observation.retained:
            self.retained.note(True)
        self.note_order(observation.size.layout, observation.pattern)
        if self.any_order:
            observation = observation.in_any_order()
        self.doubts_beyond = False
        self._note_group(observation.size)
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
            self._similar = {}
            self.other._forget()
        self._prefer(observation.size.layout)
        if any(observation.born_bytes) or observation.all_born_bytes:
            self.note_born(observation.pattern, observation.born_bytes, observation.all_born_bytes)
        self._version += 1
        if not as_expected:
            self._is_new()
        return void

    def note_order(self, layout: Layout, pattern: Pattern) -> None:
        """A step ran these blocks, in this order."""
        known = [
            estimator.pattern for (of, _), estimator in self._estimators.items() if of == layout
        ]
        if any(len(one) != len(pattern) for one in known):
            self.skips.note(True)
        if layout in self._similar:
            known.append(self._similar[layout].seen.pattern)
        if not all(in_one_order(one, pattern) for one in known):
            self.orders_vary()

    def orders_vary(self) -> None:
        """Blocks ran in another order than before: from now on plans are for any."""
        if self.any_order:
            return
        self.any_order = self.other.any_order = True
        for kind in (self, self.other):
            seen = [
                one for estimator in kind._estimators.values() for one in estimator.observations
            ]
            kind._estimators, kind._preferred, kind._similar, kind._born = {}, {}, {}, {}
            for observation in seen:
                kind.learn(observation)
        self._is_new()

    def _note_group(self, size: InputSize) -> None:
        first, *others = size.passes
        if not others:
            return
        group = self._groups.get(first.layout)
        if group is not None and group.layout == size.layout:
            group.note(size)
        elif group is None or len(group.layout) < len(size.layout):  # as of patterns, the longest
            self._groups[first.layout] = MultiPass(size)

    def whole(self, size: InputSize) -> InputSize:
        """The size of a step that begins with a pass of this size, as far as one can tell."""
        group = self._groups.get(size.layout)
        return size if group is None else group.expected(size)

    def take_times(self, observation: StepObservation) -> None:
        """The times of an observation that was learned without them are known now.

        No more is: it does not count as another one.
        """
        if self.any_order:
            observation = observation.in_any_order()
        estimator = self._estimators.get((observation.size.layout, observation.pattern))
        if estimator is not None and estimator.take_times(observation):
            self._is_new()

    def note_born(
        self, pattern: Pattern, born_bytes: Sequence[int], all_born_bytes: int | None
    ) -> None:
        """Gradients came into being in this order: exact, whatever else the step was like.

        Where some existed already there were fewer, so the most that was seen counts. Of blocks in
        any order, which of them come first is not told.
        """
        if self.any_order:
            pattern = tuple(sorted(pattern))
            born_bytes = (max((all_born_bytes or 0, *born_bytes)),) * len(pattern)
        now = (*born_bytes, _ALL if all_born_bytes is None else all_born_bytes)
        known = self._born.get(pattern)
        self._born[pattern] = tuple(map(max, known, now)) if known else now

    def note_given_up(self, runs: frozenset[Run]) -> None:
        """A step had passes without a backward: after some such steps that is expected."""
        self._given_up[runs] += 1
        if self._given_up[runs] >= _FEW:
            self.unused.update(runs)

    def note_similar(self, seen: StepObservation) -> None:
        """A step that was seen whole shows which runs are alike."""
        similar, known = SimilarBlocks.among(seen), self._similar.get(seen.size.layout)
        if known is None or known.seen.pattern != seen.pattern or len(similar) >= len(known):
            self._similar[seen.size.layout] = similar

    def not_alike(self, size: InputSize) -> None:
        """What was taken for alike was not in a step of this size: the next is seen whole."""
        self._strangers += 1
        self._similar.pop(size.layout, None)

    def similar_for(self, size: InputSize) -> SimilarBlocks | None:
        """The runs that tell of each other in a step of this size, if any are known to."""
        similar, estimator = self._similar.get(size.layout), self._preferred.get(size.layout)
        if similar is None or self.any_order or self._strangers >= _MOST_STRANGERS:
            return None
        if estimator is not None and (estimator.noisy or estimator.pattern != similar.seen.pattern):
            return None
        return similar

    def seen_like(self, size: InputSize) -> list[StepObservation]:
        """What counts, of steps laid out like this one."""
        estimator = self._preferred.get(size.layout)
        return [] if estimator is None else estimator.observations

    @property
    def layouts(self) -> list[Layout]:
        """The arguments that steps began with, of both kinds, in the order in which they came."""
        keys = (*self._estimators, *self.other._estimators)
        return list(dict.fromkeys(_first_of(layout) for layout, _ in keys))

    def predict(self, size: InputSize) -> Profile | None:
        """The profile at `size`, without born gradients; None where too little is known."""
        estimator = self._preferred.get(size.layout)
        return None if estimator is None else estimator.predict(size)

    def estimate(self, size: InputSize) -> Estimate | None:
        """A prediction of `size` or, failing that, an upper bound that says it is one."""
        predicted = self.predict(size)
        if predicted is not None:
            return Estimate(predicted)
        bound = self.bound(size)
        return None if bound is None else Estimate(bound, at_most_as=bound.size)

    def extrapolate(self, size: InputSize) -> Estimate | None:
        """What a size beyond those seen would cost; for questions, not for plans."""
        for kind in (self, self.other):
            estimator = kind._preferred.get(size.layout)
            told = None if estimator is None else estimator.extrapolate(size)
            if told is not None:
                return Estimate(told[0], uncertainty=told[1])
        return None

    def doubtful(self, size: InputSize) -> bool:
        """Whether a step of this size had better be watched: noise, or outside what was seen."""
        estimator = self._estimator_for(size)
        if estimator is None or estimator.noisy:
            return True
        return not estimator.covers(size) or estimator.below(size)

    def beyond(self, size: InputSize) -> bool:
        """Whether a size is larger than all that were seen."""
        estimator = self._estimator_for(size)
        return estimator is not None and not estimator.covers(size)

    def far_beyond(self, size: InputSize) -> bool:
        """Whether it is so much larger that its prediction has to be generous."""
        estimator = self._estimator_for(size)
        return estimator is not None and estimator.far_beyond(size)

    def bound(self, size: InputSize) -> Profile | None:
        """A profile that is no lower than that of `size`: the other kind's, or that of a larger one
        that was seen."""
        own, others = self._preferred.get(size.layout), self.other._preferred.get(size.layout)
        if own is not None and others is not None and own.pattern != others.pattern:
            others = None
        bound = self._like_ours(others.predict(size), others.pattern) if others else None
        if bound is None and own is not None:
            bound = own.bound(size)
        if bound is None and others is not None:
            bound = self._like_ours(others.bound(size), others.pattern)
        return bound

    def curious(self, size: InputSize) -> bool:
        """Whether a few more observations would make it ready for such sizes.

        Not where the other kind stands in for a few plans only, as after a failure.
        """
        estimator = self._preferred.get(size.layout)
        if estimator is None and self.other.predict(size) is not None:
            return self._stood_in >= _FEW
        return estimator is None or not (estimator.ready or estimator.observed >= _ENOUGH)

    def curious_at_ease(self, size: InputSize) -> bool:
        """Whether to observe a step of this size although everything could be kept in it.

        A bound shows that everything fits, but says little of what the size really costs under
        this or another budget. Asked for a few times in a run at most, since observing takes time;
        not for steps of several passes, whose sizes vary in too many ways for a few to tell.
        """
        if self._at_ease >= _ENOUGH or len(size.passes) > 1 or not self.curious(size):
            return False
        self._at_ease += 1
        return True

    def planned_by_bound(self) -> None:
        """A plan was made by something that is no lower than what it is for."""
        self._stood_in += 1

    def failed(self, size: InputSize) -> None:
        """A step of this size ran out of memory: each kind is doubted until one of it as large was
        observed."""
        for kind in (self, self.other):
            kind._failed_at, kind.look_in = size, 0
            kind.prediction_margin.failed()

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
        if estimator is None:
            estimator = self.other._preferred.get(size.layout)
        return (size, None) if estimator is None else (estimator.sharing(size), estimator.pattern)

    def born_bytes(self, pattern: Pattern, missing_bytes: int) -> tuple[tuple[int, ...], int]:
        """Gradients that will be born before each run's recompute, and in all, if so much is
        missing now."""
        if not missing_bytes:
            return (0,) * len(pattern), 0
        known = self._born.get(pattern)
        if known is None:  # never seen, in this kind of step: all of them, at once
            return (missing_bytes,) * len(pattern), missing_bytes
        *before, in_all = [min(born, missing_bytes) for born in known]
        return tuple(before), in_all

    def in_step(
        self, pattern: Pattern, missing_bytes: int, stale_bytes: int = 0, beside_bytes: int = 0
    ) -> InStep:
        """What happens in a step besides its size, if so much is missing and so much is stale."""
        born, all_born = self.born_bytes(pattern, missing_bytes)
        # In any order a run may come when all that others keep is there, as in a retained graph.
        stays = bool(self.retained) or self.any_order
        return born, stale_bytes, all_born + self.later_bytes, stays, beside_bytes

    def peaked(self, size: InputSize, predicted_rise: int, real_rise: int | None) -> None:
        """A step rose so far above its start; None if nobody could see.

        Beyond the range seen a difference says nothing of what is known; it is a reason to observe.
        Nor does it where the other kind stands in.
        """
        estimator = self._preferred.get(size.layout)
        if real_rise is None:
            self.prediction_margin.peaked_unseen()
        elif estimator is not None and estimator.covers(size) and estimator.predict(size):
            self.prediction_margin.peaked(predicted_rise, real_rise)
            if not self.prediction_margin.in_doubt:
                estimator.confirmed()

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone, for files."""
        return {
            "observations": [o.to_plain() for o in self._observations()],
            "born": self.of(born=True)._births(),
            "born_beside": self.of(born=False)._births(),
            "unused": sorted(map(list, self.unused)),
            "any_order": self.any_order,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], blocks: int | None = None) -> CostModel:
        """What `to_plain` gave, of a model of so many blocks, learned again."""
        cost_model = cls()
        cost_model.any_order = cost_model.other.any_order = bool(plain.get("any_order", False))
        for observation in plain["observations"]:
            step = StepObservation.from_plain(observation, blocks)
            cost_model.of(born=step.gradients_born).learn(step)
        for kind, births in ((True, plain["born"]), (False, plain.get("born_beside", ()))):
            for pattern, born in births:
                runs = tuple((int(block), int(nth)) for block, nth in pattern)
                numbers = [*map(int, born)]
                if len(numbers) == len(runs):  # as older versions wrote it
                    numbers.append(_ALL)
                if len(numbers) != len(runs) + 1:
                    raise ValueError(f"gradients of {len(born)} runs where there are {len(runs)}")
                cost_model.of(born=kind).note_born(runs, numbers[:-1], numbers[-1])
        cost_model.unused.update((int(block), int(nth)) for block, nth in plain.get("unused", ()))
        return cost_model

    def _births(self) -> list[list[list[Any]]]:
        return [[list(map(list, pattern)), list(born)] for pattern, born in self._born.items()]

    def _observations(self) -> Iterable[StepObservation]:
        for estimator in self._all_estimators():
            yield from estimator.observations

    def _all_estimators(self) -> Iterable[Estimator]:
        return (*self._estimators.values(), *self.other._estimators.values())

    def _estimator_for(self, size: InputSize) -> Estimator | None:
        """The one that a prediction or a bound of this size comes from, most likely."""
        own, others = self._preferred.get(size.layout), self.other._preferred.get(size.layout)
        if own is None:
            return others
        if others is None or own.pattern != others.pattern:
            return own
        return others if own.predict(size) is None and others.predict(size) else own

    def _like_ours(self, profile: Profile | None, pattern: Pattern) -> Profile | None:
        """A bound for this kind of step, from a profile of the other kind.

        Gradients that are born stay: what `born_bytes` tells of is added to levels, and a run's own
        are in the peak of its backward, the head's in that of the head. Those that are added to
        others are gone at once; of what comes before the first run they are in the tail.
        """
        born = self.of(born=True)._born.get(pattern)
        if profile is None or born is None or born[-1] == _ALL:
            return None
        *before, in_all = born
        if not self.born:
            return replace(profile, tail=profile.tail + max(0, in_all - before[0]))
        once_done = (in_all, *before)
        runs = tuple(
            run._replace(back=run.back + max(0, after - at))
            for run, at, after in zip(profile.runs, before, once_done, strict=False)
        )
        return replace(profile, runs=runs, head_backward=profile.head_backward + before[-1])

    def _forget(self) -> None:
        """What was known of the other kind has become void, and so has this."""
        for estimator in self._estimators.values():
            estimator.forget()
        self._largest, self._similar, self.prediction_margin = {}, {}, PredictionMargin()

    def _is_new(self) -> None:
        self.mark = self.other.mark = object()

    def _prefer(self, layout: Layout) -> None:
        fitting = [e for (of, _), e in self._estimators.items() if of == layout]
        self._preferred[layout] = max(fitting, key=lambda e: (len(e.pattern), len(e)))


def _first_of(layout: Layout) -> Layout:
    """The layout of a step's first pass."""
    return InputSize(layout, (1,) * sum(rank for _, rank in layout)).passes[0].layout
