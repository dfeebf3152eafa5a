"""What is predicted of a size, and how far it can be relied on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mimose.costs import InputSize, Profile


class State(Enum):
    """How far a prediction can be relied on."""

    UNKNOWN = "unknown"
    """Nothing was observed that tells what this size costs; at most there is a guess."""
    LEARNING = "learning"
    """A bound, an extrapolation, or a fit of too few observations."""
    TRUSTED = "trusted"
    """Observed, or fitted with a small leave-one-out error, between sizes that were observed."""
    SUSPECT = "suspect"
    """Something contradicts it, or memory depends on more than the size."""


class Surprise(Enum):
    """What may happen in a step that its plan did not expect."""

    PEAK_HIGHER = "the peak was higher than predicted"
    UNKNOWN_RUN = "a block ran that the plan does not know"
    OTHER_ORDER = "blocks ran in another order"
    RUNS_SKIPPED = "blocks were skipped"
    OUT_OF_MEMORY = "memory ran out"
    EVICTED = "kept activations had to be dropped"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a size costs."""

    profile: Profile
    state: State = State.TRUSTED
    uncertainty: float = 0.0
    """By how much the real peak may exceed the predicted one, as a share of it."""
    bound_of: InputSize | None = None
    """For an upper bound, the observed size whose costs these are; None for a prediction."""

    @property
    def trusted(self) -> bool:
        return self.state is State.TRUSTED
