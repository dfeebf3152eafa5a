"""What was learned of a model in one regime."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mimose.costs import (
    InputSize,
    Layout,
    Pattern,
    Run,
    RunCost,
    StepConditions,
    StepObservation,
    in_one_order,
)
from mimose.estimation.estimator import Estimator
from mimose.estimation.multi_pass import MultiPass
from mimose.estimation.prediction import Prediction, State, Surprise
from mimose.estimation.proportions import Proportions
from mimose.estimation.reliability import Reliability
from mimose.estimation.sticky_flag import StickyFlag

_ENOUGH = 12
"""Observations after which sizes that cannot be predicted are no longer observed for their own
sake, if a larger one bounds them."""
_PLANNED_BETWEEN = 7
"""Planned steps between two that are measured, if memory depends on more than the size."""
_ALL = 1 << 62
"""Stands for the gradients of all parameters that have none yet."""
_versions = itertools.count()
_FEW = 3
"""Planned steps in which one kind may stand in for the other before that is observed; and steps
with passes that have no backward, before these are taken for usual."""


class CostModel:
    """Estimators by input layout and pattern of runs.

    Most models have one layout and one pattern. A contrastive loss runs its blocks twice a step, a
    GAN now once and now twice: of several patterns the longest is planned for, since a step's
    pattern is not known at its start. The size of such a step is that of all its passes.
    """

    def __init__(self) -> None:
        self._estimators: dict[tuple[Layout, Pattern, bool], Estimator] = {}
        self._preferred: dict[tuple[Layout, bool], Estimator] = {}
        self.allocates = True
        """Whether the coming step allocates most gradients, rather than adding to existing ones."""
        self._multi_pass: dict[Layout, MultiPass] = {}
        self._gradients: dict[tuple[Pattern, bool], tuple[int, ...]] = {}
        """The most gradients that were allocated before each run's backward; and in all."""
        self.unused: set[Run] = set()
        """Runs that a loss did not use: plans do not know them."""
        self.retained = StickyFlag()
        """Whether graphs outlive their backwards."""
        self.skips = StickyFlag()
        """Whether steps leave some of their runs out."""
        self.any_order = False
        """Whether blocks have run in more than one order: each may come at any time then."""
        self._later_bytes = self._stood_in = 0
        self._without_backward: Counter[frozenset[Run]] = Counter()
        self.reliability = Reliability()
        self.version = next(_versions)
        """Changes whenever predictions may have changed; no two cost models share one."""

    @property
    def later_backward_bytes(self) -> int:
        """What later backwards through one graph find beyond the first: saved gradients, say."""
        return self._later_bytes if self.retained else 0

    def note_later_backward(self, number_of_bytes: int) -> None:
        """A later backward through the same graph found so much more."""
        if number_of_bytes > self._later_bytes:
            self._later_bytes = number_of_bytes
            self.version = next(_versions)

    @property
    def observed(self) -> int:
        """How many observations there were."""
        return sum(estimator.version for estimator in self._estimators.values())

    @property
    def ready(self) -> bool:
        """Whether sizes that were never seen can be predicted and trusted."""
        return any(estimator.ready for estimator in self._estimators.values())

    @property
    def regular(self) -> bool:
        """Whether each step has the same runs in the same order and one backward, so that bytes
        can leave the device and come back as planned."""
        return not (self.any_order or self.retained or self.skips)

    @property
    def error(self) -> float | None:
        """The largest leave-one-out error of the peak, as a share of it."""
        errors = [e.error for e in self._estimators.values() if e.error is not None]
        return max(errors, default=None)

    @property
    def layouts(self) -> list[Layout]:
        """The arguments that steps began with, in the order in which they came."""
        return list(dict.fromkeys(_first_of(layout) for layout, _, _ in self._estimators))

    # Learning

    def learn(self, observation: StepObservation) -> bool:
        """Learn from one more observation; whether it voided what was known before."""
        if observation.profile.prelude is None:  # not measured: what was known of it still holds
            known = self.predict(observation.size)
            prelude = known.profile.prelude if known else 0
            observation = replace(
                observation, profile=replace(observation.profile, prelude=prelude)
            )
        if observation.retained:
            self.retained.note(True)
        self.note_order(observation.size.layout, observation.pattern)
        if self.any_order:
            observation = observation.in_any_order()
        self._note_passes(observation.size)
        key = (observation.size.layout, observation.pattern, observation.allocates)
        estimator = self._estimators.setdefault(key, Estimator(observation.pattern))
        void = estimator.learn(observation, doubted=self.reliability.doubted)
        if void:
            self._estimators, self._preferred = {key: estimator}, {}
            self.reliability = Reliability()
        else:
            self.reliability.observed(observation.size)
        self._prefer(key[0], key[2])
        if any(observation.gradients_allocated) or observation.all_gradients_allocated:
            self.note_gradients(
                observation.pattern,
                observation.gradients_allocated,
                observation.all_gradients_allocated,
                allocates=observation.allocates,
            )
        self.version = next(_versions)
        return void

    def take_times(self, observation: StepObservation) -> None:
        """The times of an observation that was learned without them."""
        if self.any_order:
            observation = observation.in_any_order()
        key = (observation.size.layout, observation.pattern, observation.allocates)
        estimator = self._estimators.get(key)
        if estimator is not None:
            estimator.take_times(observation)
            self.version = next(_versions)

    def note_order(self, layout: Layout, pattern: Pattern) -> None:
        """A step ran these blocks, in this order."""
        known = [e.pattern for (of, _, _), e in self._estimators.items() if of == layout]
        if any(len(one) != len(pattern) for one in known):
            self.skips.note(True)
        if not all(in_one_order(one, pattern) for one in known):
            self.assume_any_order()

    def assume_any_order(self) -> None:
        """Blocks ran in another order than before: from now on plans are for any."""
        if self.any_order:
            return
        self.any_order = True
        observations = self.observations
        self._estimators, self._preferred, self._gradients = {}, {}, {}
        for observation in observations:
            self.learn(observation)
        self.version = next(_versions)

    def note_gradients(
        self,
        pattern: Pattern,
        allocated: Sequence[int],
        all_allocated: int | None,
        *,
        allocates: bool = True,
    ) -> None:
        """Gradients were allocated before each run's backward, and in all; in a step that
        `allocates` most of them, or in one that adds to most.

        Where some existed already there were fewer, so the most that was seen counts. Of blocks in
        any order, which of them come first is not known.
        """
        if self.any_order:
            pattern = tuple(sorted(pattern))
            allocated = (max((all_allocated or 0, *allocated)),) * len(pattern)
        now = (*allocated, _ALL if all_allocated is None else all_allocated)
        known = self._gradients.get((pattern, allocates))
        self._gradients[pattern, allocates] = tuple(map(max, known, now)) if known else now

    def note_without_backward(self, runs: frozenset[Run]) -> None:
        """A step had passes without a backward: after some such steps that is expected."""
        self._without_backward[runs] += 1
        if self._without_backward[runs] >= _FEW:
            self.unused.update(runs)

    def _note_passes(self, size: InputSize) -> None:
        first, *others = size.passes
        if not others:
            return
        known = self._multi_pass.get(first.layout)
        if known is not None and known.layout == size.layout:
            known.note(size)
        elif known is None or len(known.layout) < len(size.layout):  # as of patterns, the longest
            self._multi_pass[first.layout] = MultiPass(size)

    # Predicting

    def expected_size(self, size: InputSize) -> InputSize:
        """The size of a step that begins with a pass of this size, as far as can be known."""
        known = self._multi_pass.get(size.layout)
        return size if known is None else known.expected(size)

    def predict(self, size: InputSize) -> Prediction | None:
        """What a size costs or, failing that, a larger one; None where neither is known.

        Steps that allocate gradients and steps that add to them hardly differ, so one kind stands
        in for the other, untrusted.
        """
        prediction = self._predict(self._own(size), size)
        if prediction is None:
            prediction = self._predict(self._preferred.get((size.layout, not self.allocates)), size)
            if prediction is not None and prediction.trusted:
                prediction = replace(prediction, state=State.LEARNING)
        if prediction is not None and prediction.trusted and self.reliability.suspects(size):
            return replace(prediction, state=State.SUSPECT)
        return prediction

    def _predict(self, estimator: Estimator | None, size: InputSize) -> Prediction | None:
        return None if estimator is None else estimator.predict(size) or estimator.bound(size)

    def for_planning(self, size: InputSize) -> Prediction | None:
        """The same or, failing that, a generous guess from a smaller size."""
        prediction = self.predict(size)
        estimator = self._estimator_for(size)
        if prediction is not None or estimator is None:
            return prediction
        return estimator.guess(size)

    def extrapolate(self, size: InputSize) -> Prediction | None:
        """What a size beyond those seen would cost, for questions rather than for plans."""
        estimator = self._estimator_for(size)
        return None if estimator is None else estimator.extrapolate(size)

    def exceeds_observed(self, size: InputSize) -> bool:
        """Whether a size is larger than all that were seen."""
        estimator = self._estimator_for(size)
        return estimator is not None and not estimator.covers(size)

    def worth_measuring(self, size: InputSize) -> bool:
        """Whether measuring a step of such a size improves predictions.

        Where observations do not follow the size, more of them do not help: they would only make
        memory that depends on the size in an odd way seem to depend on something else. Where it
        does, some are enough.
        """
        estimator = self._own(size)
        if estimator is None:
            return True
        if estimator.noisy:
            return estimator.planned_since >= _PLANNED_BETWEEN
        return not estimator.unfit

    def uncertainty(self, size: InputSize) -> float:
        """By how much peaks have exceeded what was predicted of them lately, as a share.

        Where memory depends on more than the size, predictions are the upper end already.
        """
        estimator = self._own(size)
        noisy = estimator is not None and estimator.noisy
        return 0.0 if noisy else self.reliability.uncertainty

    def proportions(self, size: InputSize) -> Proportions:
        """Which quantities of runs have varied together in steps laid out like this one."""
        estimator = self._estimator_for(size)
        return Proportions() if estimator is None else estimator.proportions

    def worth_observing(self, size: InputSize) -> bool:
        """Whether observing a step of this size teaches anything."""
        if self.reliability.suspects(size):
            return True
        estimator = self._own(size)
        if estimator is not None:
            prediction = estimator.predict(size)
            if prediction is not None and (prediction.trusted or estimator.ready):
                return False
            if prediction is not None or estimator.bound(size) is not None:
                return estimator.observed < _ENOUGH
        return self._stood_in >= _FEW or not self._is_stood_in_for(size)

    def _is_stood_in_for(self, size: InputSize) -> bool:
        """Whether the other kind of step is known well enough to stand in for the coming one."""
        other = self._preferred.get((size.layout, not self.allocates))
        prediction = None if other is None else other.predict(size)
        return prediction is not None and prediction.trusted

    def note_planned(self, size: InputSize) -> None:
        """A step of this size is planned; of one kind that stands in for the other, a few are."""
        own = self._own(size)
        self._stood_in += self._predict(own, size) is None
        if own is not None:
            own.planned_since += 1

    def pattern_for(self, size: InputSize) -> Pattern | None:
        """The runs that a step of this size is expected to have."""
        estimator = self._estimator_for(size)
        return None if estimator is None else estimator.pattern

    def latest_costs(self, size: InputSize) -> dict[Run, RunCost]:
        """What each run cost in the latest observation of a step laid out like this one."""
        estimator = self._estimator_for(size)
        if estimator is None or not estimator.observations:
            return {}
        latest = estimator.observations[-1]
        return dict(zip(latest.pattern, latest.runs, strict=True))

    def conditions(
        self,
        pattern: Pattern,
        missing_bytes: int,
        previous_output_bytes: int = 0,
        beside_bytes: int = 0,
    ) -> StepConditions:
        """The conditions of a step at whose start gradients of so many bytes do not exist."""
        allocated, in_all = self._gradients_for(pattern, missing_bytes)
        # In any order a run may come when all that others keep is there, as in a retained graph.
        retained = bool(self.retained) or self.any_order
        return StepConditions(
            allocated,
            in_all + self.later_backward_bytes,
            previous_output_bytes,
            retained,
            beside_bytes,
        )

    def _gradients_for(self, pattern: Pattern, missing_bytes: int) -> tuple[tuple[int, ...], int]:
        """Gradients that will be allocated before each run's backward, and in all."""
        if not missing_bytes:
            return (0,) * len(pattern), 0
        own, other = (pattern, self.allocates), (pattern, not self.allocates)
        known = self._gradients.get(own) or self._gradients.get(other)
        if known is None:  # never seen: all of them, at once
            return (missing_bytes,) * len(pattern), missing_bytes
        *before, in_all = [min(allocated, missing_bytes) for allocated in known]
        return tuple(before), in_all

    def peaked(
        self, size: InputSize, predicted_rise: int, real_rise: int, *, matters: bool = True
    ) -> None:
        """A planned step rose so far above its start, and its prediction was trusted."""
        estimator = self._estimator_for(size)
        if estimator is None or not estimator.covers(size):
            return
        if estimator.noisy:  # then the prediction is the upper end
            matters &= real_rise > predicted_rise
        self.reliability.peaked(predicted_rise, real_rise, matters=matters)
        if not self.reliability.doubted:
            estimator.confirmed()

    def surprised(self, surprise: Surprise) -> None:
        """A step did not go as its plan expected."""
        self.reliability.surprised(surprise)

    # Files

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone, for files."""
        return {
            "observations": [o.to_plain() for o in self.observations],
            "gradients": [
                [list(map(list, pattern)), list(numbers), allocates]
                for (pattern, allocates), numbers in self._gradients.items()
            ],
            "unused": sorted(map(list, self.unused)),
            "any_order": self.any_order,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], blocks: int | None = None) -> CostModel:
        """What `to_plain` gave, of a model of so many blocks, learned again."""
        cost_model = cls()
        cost_model.any_order = bool(plain.get("any_order", False))
        for observation in plain["observations"]:
            cost_model.learn(StepObservation.from_plain(observation, blocks))
        older = [*plain.get("born", ())], [[*one, False] for one in plain.get("born_beside", ())]
        for pattern, numbers, *kind in plain.get("gradients", [*older[0], *older[1]]):
            runs = tuple((int(block), int(nth)) for block, nth in pattern)
            known = [*map(int, numbers)]
            if len(known) == len(runs):  # as older versions wrote it
                known.append(_ALL)
            if len(known) != len(runs) + 1:
                raise ValueError(f"gradients of {len(numbers)} runs where there are {len(runs)}")
            allocates = bool(kind[0]) if kind else True
            cost_model.note_gradients(runs, known[:-1], known[-1], allocates=allocates)
        cost_model.unused.update((int(block), int(nth)) for block, nth in plain.get("unused", ()))
        return cost_model

    @property
    def observations(self) -> list[StepObservation]:
        """The observations that predictions use."""
        return [o for estimator in self._estimators.values() for o in estimator.observations]

    def _prefer(self, layout: Layout, allocates: bool) -> None:
        kind = layout, allocates
        fitting = [e for (of, _, how), e in self._estimators.items() if (of, how) == kind]
        self._preferred[kind] = max(fitting, key=lambda e: (len(e.pattern), len(e)))

    def _own(self, size: InputSize) -> Estimator | None:
        """The estimator of the kind of step that comes."""
        return self._preferred.get((size.layout, self.allocates))

    def _estimator_for(self, size: InputSize) -> Estimator | None:
        """The same or, where there is none, that of the other kind."""
        return self._own(size) or self._preferred.get((size.layout, not self.allocates))


def _first_of(layout: Layout) -> Layout:
    """The layout of a step's first pass."""
    return InputSize(layout, (1,) * sum(rank for _, rank in layout)).passes[0].layout
