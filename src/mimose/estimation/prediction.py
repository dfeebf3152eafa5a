"""A prediction of a step's costs, and how reliable it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mimose.costs import InputSize, Pattern, Profile


class State(Enum):
    """How reliable a prediction is."""

    UNKNOWN = "unknown"
    """No observation covers this size; there is a guess at most."""
    LEARNING = "learning"
    """A bound, an extrapolation, or a fit of too few observations."""
    TRUSTED = "trusted"
    """Observed, or fitted with a small leave-one-out error within the range of observed sizes."""
    SUSPECT = "suspect"
    """A step has contradicted it, or memory depends on more than the input size."""


class Surprise(Enum):
    """An event in a step that its plan did not expect."""

    UNKNOWN_RUN = "a block ran that the plan does not know"
    OTHER_ORDER = "blocks ran in another order"
    RUNS_SKIPPED = "blocks were skipped"
    OUT_OF_MEMORY = "memory ran out"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted costs of one input size."""

    pattern: Pattern
    """The runs that the profile holds the costs of."""
    profile: Profile
    state: State = State.TRUSTED
    uncertainty: float = 0.0
    """By how much the real peak may exceed the predicted one, as a fraction of that."""
    bound_of: InputSize | None = None
    """The observed larger size whose costs these are, as an upper bound; None for a prediction."""

    @property
    def trusted(self) -> bool:
        return self.state is State.TRUSTED

    @property
    def profile_as_run(self) -> Profile:
        """The profile of a step that runs by it: unless it is trusted, kept runs can be evicted,
        and hold their arguments."""
        return self.profile if self.trusted else self.profile.holding_arguments()
