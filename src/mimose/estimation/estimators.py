"""The estimators of a cost model, and which of them predicts the coming step."""

from __future__ import annotations

from collections.abc import Iterator

from mimose.costs import Layout, Pattern, Profile, StepObservation
from mimose.estimation.estimator import Estimator


class Estimators:
    """One estimator for each input layout, pattern of runs and kind of step.

    There are two kinds of steps: those that allocate most gradients, and those that add to existing
    ones. A step's layout and kind are known when it starts, its pattern is not. So predictions
    assume the longest pattern, and of equally long ones the one with the most observations.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[Layout, Pattern, bool], Estimator] = {}
        self._preferred: dict[tuple[Layout, bool], Estimator] = {}

    def __iter__(self) -> Iterator[Estimator]:
        return iter(self._all.values())

    def preferred(self, layout: Layout, *, allocates: bool) -> Estimator | None:
        """The estimator for a step with this layout and of this kind."""
        return self._preferred.get((layout, allocates))

    def agree(self, observation: StepObservation) -> bool:
        """Whether an observation is as predicted, so that plans need not be made again."""
        estimator = self._all.get(_key_of(observation))
        kind = observation.size.layout, observation.allocates
        return (
            estimator is not None
            and estimator is self._preferred.get(kind)
            and estimator.agrees(observation)
        )

    def expected(self, observation: StepObservation) -> Profile | None:
        """The costs that an observation is expected to have; None if nothing tells."""
        estimator = self._all.get(_key_of(observation))
        prediction = None if estimator is None else estimator.expect(observation.size)
        return None if prediction is None else prediction.profile

    def learn(self, observation: StepObservation, *, doubted: bool) -> bool:
        """Learn from an observation. Returns whether it contradicted, and voided, all others."""
        layout, _, allocates = key = _key_of(observation)
        estimator = self._all.setdefault(key, Estimator(observation.pattern))
        void = estimator.learn(observation, doubted=doubted)
        if void:
            self._all, self._preferred = {key: estimator}, {}
        candidates = [
            other
            for (its_layout, _, its_kind), other in self._all.items()
            if its_layout == layout and its_kind == allocates
        ]
        longest = max(candidates, key=lambda e: (len(e.pattern), len(e)))
        self._preferred[layout, allocates] = longest
        return void

    def take_times(self, observation: StepObservation) -> bool:
        """Use the times of an observation that was learned without them; whether it was learned."""
        estimator = self._all.get(_key_of(observation))
        if estimator is not None:
            estimator.take_times(observation)
        return estimator is not None

    def patterns(self, layout: Layout) -> list[Pattern]:
        """The patterns of all observed steps with this layout."""
        return [pattern for its_layout, pattern, _ in self._all if its_layout == layout]

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of all observed steps, in the order in which they came."""
        return list(dict.fromkeys(layout for layout, _, _ in self._all))

    def observations(self) -> list[StepObservation]:
        """The observations of all estimators."""
        return [observation for estimator in self for observation in estimator.observations]


def _key_of(observation: StepObservation) -> tuple[Layout, Pattern, bool]:
    return observation.size.layout, observation.pattern, observation.allocates
