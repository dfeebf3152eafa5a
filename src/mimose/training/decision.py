"""The decision for a step, as a value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from mimose.costs import InputSize, Option, Run
from mimose.estimation import State
from mimose.planning import NO_PLAN, CachedPlan, Plan

AS_PLANNED, STRICTER, EVERYTHING = range(3)
"""How strict a plan must be: after a failure, halfway to everything, then everything."""


class PlanKey(NamedTuple):
    """Everything that a plan depends on."""

    available_bytes: int
    size: InputSize
    missing: tuple[bool, ...]
    """For a sample of parameters, whether the gradient does not exist at the step's start."""
    previous_bytes: int
    """Bytes of the previous step's outputs that are freed by the backward."""
    retained: bool
    """Whether backwards retain their graphs."""
    skips: bool
    """Whether steps skip some of their runs."""
    later_bytes: int
    version: int
    """The version of the cost model."""
    strictness: int
    beside_bytes: int = 0
    """Bytes that steps of other handles add while this one is open."""
    may_evict: bool = False
    """Whether kept activations can be evicted if memory runs short."""
    link: int = 0
    """`HostUse.version`: changes with the link's speed and the usable host memory."""
    planner: int = 0
    """`Planner.version`."""
    done: tuple[Option, ...] = ()
    """The choices of runs that had already run when the plan was made."""

    @property
    def conditions(self) -> tuple[Any, ...]:
        """All but the available bytes: the key of the plan cache."""
        return self[1:]


class Decision(NamedTuple):
    """How a step runs."""

    cached: CachedPlan
    available_bytes: int = 0
    key: PlanKey | None = None
    new: bool = False
    """Whether the plan was made for this step."""
    observed: bool = False
    """Whether the step runs in order to learn from it."""
    measured: bool = False
    """Whether a collector measures the costs of its runs."""
    evictable: bool = False
    """Whether kept activations may be evicted if memory runs short, at least those of some runs."""

    @property
    def trusted(self) -> bool:
        """Whether the prediction is trusted."""
        return self.cached.state is State.TRUSTED

    def may_evict(self, run: Run) -> bool:
        """Whether the activations of a kept run may be evicted. What is measured costs no more if
        they may."""
        return self.evictable and (self.measured or run in self.cached.evictable)

    @property
    def bounded(self) -> bool:
        """Whether the predicted peak is only an upper bound."""
        return not self.cached.exact

    def with_choices(self, choices: dict[Run, Option]) -> Decision:
        """The same step under other choices.

        A choice to move bytes that cannot be moved is replaced by one that the run has.
        """
        plan, profile = self.cached.plan, self.cached.profile
        chosen = tuple(choices.values())
        if chosen == plan.choices:
            return self
        if profile is not None:
            plan = Plan.of(profile, chosen, self.available_bytes)
            choices = dict(zip(choices, plan.choices, strict=True))
        cached = replace(self.cached, plan=plan, choices=choices, guarded=frozenset())
        return self._replace(cached=cached)

    def keeping_nothing(self) -> Decision:
        """The same step with every run recomputed."""
        return self.with_choices(dict.fromkeys(self.cached.choices, Option.RECOMPUTE))

    def seen_by_all(self) -> Decision:
        """The same step, observed with every run recomputed."""
        return UNKNOWN._replace(available_bytes=self.available_bytes)


_NOTHING_KNOWN = CachedPlan(NO_PLAN, {}, state=State.UNKNOWN)

UNKNOWN = Decision(_NOTHING_KNOWN, observed=True, measured=True)
"""Nothing is known: every run is recomputed, and measured."""
EVERYTHING_RECOMPUTED = Decision(_NOTHING_KNOWN)
"""After a failure: every run is recomputed, and nothing is measured."""
