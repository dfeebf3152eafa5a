"""The costs of a model's steps in one regime, learned from observations."""

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
from mimose.estimation.allocated_gradients import AllocatedGradients
from mimose.estimation.estimator import Estimator
from mimose.estimation.estimators import Estimators
from mimose.estimation.multi_pass import MultiPass
from mimose.estimation.prediction import Prediction, State
from mimose.estimation.proportions import Proportions
from mimose.estimation.reliability import Reliability
from mimose.estimation.sticky_flag import StickyFlag

_ENOUGH = 12
"""Observations after which a size that cannot be predicted is not observed any more, if an observed
larger size bounds it."""
_PLANNED_BETWEEN = 7
"""Planned steps between two measured ones, if memory depends on more than the size."""
_PLANNED_BETWEEN_IF_ROOMY = 31
"""The same for steps that are far from what is available. A measured step takes 1.3 to 1.6 times as
long where launches bind."""
_FEW = 3
"""Planned steps in which one kind of step stands in for the other before the other is observed; and
steps with runs that had no backward before plans expect that."""
_versions = itertools.count()


class CostModel:
    """Learns from observations of steps, and predicts the costs of coming ones.

    Most models have one input layout and one pattern of runs. A contrastive loss runs each block
    twice a step, a GAN sometimes once and sometimes twice. The pattern of a step is not known at
    its start, so the longest observed pattern is planned for. The size of a step with several
    forward passes has the tensors of all passes.
    """

    def __init__(self) -> None:
        self._estimators = Estimators()
        self.allocates = True
        """Whether the coming step allocates most gradients, rather than adding to existing ones."""
        self._multi_pass: dict[Layout, MultiPass] = {}
        """Steps with several passes, by the layout of the first pass."""
        self._gradients = AllocatedGradients()
        self.unused: set[Run] = set()
        """Runs that had no backward, because the loss did not use them. Plans leave them out."""
        self.retained = StickyFlag()
        """Whether backwards retain their graphs."""
        self.skips = StickyFlag()
        """Whether steps skip some of their runs."""
        self.any_order = False
        """Whether blocks have run in more than one order. Plans then hold for any order."""
        self.later_backward_bytes = 0
        """Additional bytes in use in a later backward through the same graph, if it is retained."""
        self._stand_in_steps = 0
        """Planned steps for which the other kind of step stood in."""
        self._without_backward: Counter[frozenset[Run]] = Counter()
        self.reliability = Reliability()
        self._as_predicted: set[InputSize] = set()
        """Sizes whose observations were as predicted."""
        self.version = next(_versions)
        """Changes when plans from trusted predictions should be made again. Unique among all cost
        models."""

    def note_later_backward(self, more_bytes: int) -> None:
        """A later backward through a graph used this many bytes more than the first."""
        if more_bytes > self.later_backward_bytes:
            self.later_backward_bytes = more_bytes
            self.version = next(_versions)

    @property
    def observed(self) -> int:
        """The number of observations so far."""
        return sum(estimator.version for estimator in self._estimators)

    @property
    def ready(self) -> bool:
        """Whether sizes that were never observed can be predicted and trusted."""
        return any(estimator.ready for estimator in self._estimators)

    @property
    def regular(self) -> bool:
        """Whether each step has the same runs in the same order and one backward.

        Only then can bytes leave the device and come back as planned.
        """
        return not (self.any_order or self.retained.is_set or self.skips.is_set)

    @property
    def error(self) -> float | None:
        """The largest leave-one-out error of the peak, as a fraction of the peak."""
        return max((e.error for e in self._estimators if e.error is not None), default=None)

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the first passes of observed steps, in the order in which they came."""
        return list(dict.fromkeys(map(_layout_of_first_pass, self._estimators.layouts)))

    @property
    def observations(self) -> list[StepObservation]:
        """The observations that predictions use."""
        return self._estimators.observations()

    # Learning

    def learn(self, observation: StepObservation) -> bool:
        """Learn from an observation. Returns whether it contradicted, and voided, all others."""
        if observation.profile.prelude is None:  # not measured: the predicted one stays valid
            prediction = self.predict(observation.size)
            prelude = prediction.profile.prelude if prediction else 0
            observation = replace(
                observation, profile=replace(observation.profile, prelude=prelude)
            )
        if observation.retained:
            self.retained.note(True)
        self.note_order(observation.size.layout, observation.pattern)
        if self.any_order:
            observation = observation.in_any_order()
        self._note_passes(observation.size)
        # Where a peak was not as predicted, peaks without gradients do not tell the whole story.
        agrees = not self.reliability.doubted and self._estimators.agree(observation)
        void = self._estimators.learn(observation, doubted=self.reliability.doubted)
        if void:
            self.reliability = Reliability()
        elif not observation.provisional:  # of those, nothing may have been learned
            self.reliability.observed(observation.size)
        self._note_gradients_of(observation)
        if agrees:
            self._as_predicted.add(observation.size)
        else:
            self._as_predicted.discard(observation.size)
            self.version = next(_versions)
        return void

    def _note_gradients_of(self, observation: StepObservation) -> None:
        if any(observation.gradients_allocated) or observation.all_gradients_allocated:
            self.note_gradients(
                observation.pattern,
                observation.gradients_allocated,
                observation.all_gradients_allocated,
                allocates=observation.allocates,
            )

    def with_predicted_times(self, observation: StepObservation) -> StepObservation:
        """An observation whose times are not known yet, with those that are predicted for it."""
        expected = self._estimators.expected(observation)
        return observation if expected is None else observation.timed_as(expected)

    def take_times(self, observation: StepObservation) -> None:
        """Use the times of an observation that was learned without them."""
        if self.any_order:
            observation = observation.in_any_order()
        taken = self._estimators.take_times(observation)
        if taken and observation.size not in self._as_predicted:
            self.version = next(_versions)

    def note_order(self, layout: Layout, pattern: Pattern) -> None:
        """A step with this layout ran these blocks in this order."""
        patterns = self._estimators.patterns(layout)
        if any(len(other) != len(pattern) for other in patterns):
            self.skips.note(True)
        if not all(in_one_order(other, pattern) for other in patterns):
            self.assume_any_order()

    def assume_any_order(self) -> None:
        """Blocks ran in another order than before: from now on, plans hold for any order."""
        if self.any_order:
            return
        self.any_order = True
        observations, self._estimators = self.observations, Estimators()
        self._gradients.clear()
        for observation in observations:  # nothing new: surprises and doubts stay as they are
            self._estimators.learn(observation.in_any_order(), doubted=False)
            self._note_gradients_of(observation)
        self.version = next(_versions)

    def note_gradients(
        self,
        pattern: Pattern,
        allocated: Sequence[int],
        all_allocated: int | None,
        *,
        allocates: bool = True,
    ) -> None:
        """A step allocated gradients: bytes before each run's backward, and in all.

        If blocks run in any order, each backward may be the one that comes last.
        """
        if self.any_order:
            pattern = tuple(sorted(pattern))
            allocated = (max((all_allocated or 0, *allocated)),) * len(pattern)
        if self._gradients.note(pattern, allocated, all_allocated, allocates=allocates):
            self.version = next(_versions)

    def note_without_backward(self, runs: frozenset[Run]) -> None:
        """These runs of a step had no backward. After some such steps, plans leave them out."""
        self._without_backward[runs] += 1
        if self._without_backward[runs] >= _FEW:
            if not runs <= self.unused:
                self.version = next(_versions)
            self.unused.update(runs)

    def _note_passes(self, size: InputSize) -> None:
        first, *others = size.passes
        if not others:
            return
        known = self._multi_pass.get(first.layout)
        if known is not None and known.layout == size.layout:
            known.note(size)
        elif known is None or len(known.layout) < len(size.layout):  # the longest, as for patterns
            self._multi_pass[first.layout] = MultiPass(size)

    def note_planned(self, size: InputSize) -> None:
        """A step of this size was planned."""
        own = self._own(size)
        self._stand_in_steps += _predicted_or_bounded(own, size) is None
        if own is not None:
            own.planned_since_observed += 1

    def peaked(
        self, size: InputSize, predicted_rise: int, real_rise: int, *, matters: bool = True
    ) -> None:
        """A planned step with a trusted prediction peaked `real_rise` bytes above its start.

        `matters` is whether a deviation is worth observing a step again.
        """
        estimator = self._estimator_for(size)
        if estimator is None or not estimator.covers(size):
            return
        if estimator.noisy:  # its predictions are upper bounds
            matters &= real_rise > predicted_rise
        self.reliability.peaked(predicted_rise, real_rise, matters=matters)
        if not self.reliability.doubted:
            estimator.confirmed()

    def surprised(self) -> None:
        """A step did not go as its plan expected."""
        self.reliability.surprised()

    # Predicting

    def expected_size(self, first_pass: InputSize) -> InputSize:
        """The expected size of a whole step, given the size of its first pass."""
        known = self._multi_pass.get(first_pass.layout)
        return first_pass if known is None else known.expected(first_pass)

    def predict(self, size: InputSize) -> Prediction | None:
        """The costs of a size, or those of a larger size as an upper bound; None if unknown.

        Steps that allocate gradients and steps that add to them hardly differ. So if only the other
        kind is known, its prediction is used, but not trusted.
        """
        prediction = _predicted_or_bounded(self._own(size), size)
        if prediction is None:
            prediction = _predicted_or_bounded(self._other(size), size)
            if prediction is not None and prediction.trusted:
                prediction = replace(prediction, state=State.LEARNING)
        if prediction is not None and prediction.trusted and self.reliability.suspects(size):
            return replace(prediction, state=State.SUSPECT)
        return prediction

    def for_planning(self, size: InputSize) -> Prediction | None:
        """The prediction, or else a generous guess from a smaller size."""
        prediction = self.predict(size)
        estimator = self._estimator_for(size)
        if prediction is not None or estimator is None:
            return prediction
        return estimator.guess(size)

    def extrapolate(self, size: InputSize) -> Prediction | None:
        """The costs of a size beyond those observed, for what-if questions rather than plans."""
        estimator = self._estimator_for(size)
        return None if estimator is None else estimator.extrapolate(size)

    def exceeds_observed(self, size: InputSize) -> bool:
        """Whether a size is larger than all observed ones."""
        estimator = self._estimator_for(size)
        return estimator is not None and not estimator.covers(size)

    def uncertainty(self, size: InputSize) -> float:
        """The largest recent excess of a real peak over its prediction, as a fraction.

        It is 0 where memory depends on more than the size: predictions are upper bounds there.
        """
        largest = self.reliability.uncertainty
        estimator = self._own(size) if largest else None
        return 0.0 if estimator is not None and estimator.noisy else largest

    def proportions(self, size: InputSize) -> Proportions:
        """Which costs of runs have varied together in steps with this layout."""
        estimator = self._estimator_for(size)
        return Proportions() if estimator is None else estimator.proportions

    def latest_costs(self, size: InputSize) -> dict[Run, RunCost]:
        """The costs of each run in the latest observation with this layout."""
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
        """The conditions of a step at whose start `missing_bytes` of gradients do not exist."""
        allocated, in_all = self._gradients.expected(
            pattern, missing_bytes, allocates=self.allocates
        )
        # In any order, a run may come while all others hold what they keep, as in a retained graph.
        retained = self.retained.is_set or self.any_order
        all_allocated = in_all + (self.later_backward_bytes if self.retained.is_set else 0)
        return StepConditions(
            allocated, all_allocated, previous_output_bytes, retained, beside_bytes
        )

    # What to observe

    def worth_observing(self, size: InputSize) -> bool:
        """Whether to observe a step of this size whose prediction is not trusted."""
        if self.reliability.suspects(size):
            return True
        estimator = self._own(size)
        if estimator is not None:
            prediction = estimator.predict(size)
            if prediction is not None and (prediction.trusted or estimator.ready):
                return False
            if prediction is not None or estimator.bound(size) is not None:
                return estimator.observed < _ENOUGH
        return self._stand_in_steps >= _FEW or not self._is_stood_in_for(size)

    def worth_measuring(self, size: InputSize, *, roomy: bool = False) -> bool:
        """Whether measuring a step of this size improves predictions, if it is not observed.

        `roomy` is whether the step is far from what is available, so that less depends on it.

        Where observations do not fit the size, more of them do not help: memory that depends on the
        size in an odd way would only seem to depend on something else. Where memory does depend on
        something else, a few measurements are enough.
        """
        estimator = self._own(size)
        if estimator is None:
            return True
        if estimator.noisy:
            between = _PLANNED_BETWEEN_IF_ROOMY if roomy else _PLANNED_BETWEEN
            return estimator.planned_since_observed >= between
        return not estimator.unfit

    def _is_stood_in_for(self, size: InputSize) -> bool:
        """Whether the other kind of step has a trusted prediction for this size."""
        other = self._other(size)
        prediction = None if other is None else other.predict(size)
        return prediction is not None and prediction.trusted

    # Files

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, for JSON."""
        return {
            "observations": [observation.to_plain() for observation in self.observations],
            "gradients": self._gradients.to_plain(),
            "unused": sorted(map(list, self.unused)),
            "any_order": self.any_order,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], blocks: int | None = None) -> CostModel:
        """Learn again from the result of `to_plain`, for a model with this number of blocks."""
        cost_model = cls()
        cost_model.any_order = bool(plain.get("any_order", False))
        for observation in plain["observations"]:
            cost_model.learn(StepObservation.from_plain(observation, blocks))
        cost_model._gradients.note_plain(plain)
        cost_model.unused.update((int(block), int(nth)) for block, nth in plain.get("unused", ()))
        return cost_model

    # Which estimator

    def _own(self, size: InputSize) -> Estimator | None:
        """The estimator for the kind of the coming step."""
        return self._estimators.preferred(size.layout, allocates=self.allocates)

    def _other(self, size: InputSize) -> Estimator | None:
        """The estimator for the other kind of step."""
        return self._estimators.preferred(size.layout, allocates=not self.allocates)

    def _estimator_for(self, size: InputSize) -> Estimator | None:
        """The estimator for the kind of the coming step, or else for the other kind."""
        return self._own(size) or self._other(size)


def _predicted_or_bounded(estimator: Estimator | None, size: InputSize) -> Prediction | None:
    return None if estimator is None else estimator.predict(size) or estimator.bound(size)


def _layout_of_first_pass(layout: Layout) -> Layout:
    return InputSize(layout, (1,) * sum(rank for _, rank in layout)).passes[0].layout
