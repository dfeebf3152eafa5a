"""What a plan is made for, and what is decided for a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

from mimose.costs import InputSize, InStep, Pattern, Profile, Run
from mimose.planning.plan import Plan
from mimose.planning.plan_cache import CachedPlan, Shelved


class Kind(NamedTuple):
    """What else, besides its size, tells one kind of step from another."""

    missing: tuple[bool, ...]
    """Which gradients do not exist when it begins."""
    stale_bytes: int
    habits: Hashable
    mark: object
    strictness: int
    done: tuple[bool, ...] = ()
    """What the runs did that had run when it was planned."""
    beside_bytes: int = 0
    """What steps of other handles do meanwhile."""


class Terms(NamedTuple):
    """What a plan is made for."""

    size: InputSize
    available_bytes: int
    kind: Kind
    pattern: Pattern
    in_step: InStep
    guarded_bytes: int

    @property
    def key(self) -> tuple[InputSize, int, Kind]:
        return self.size, self.available_bytes, self.kind

    def ready(self, plan: Plan, profile: Profile | None, *, doubtful: bool = False) -> CachedPlan:
        near = self.available_bytes - self.guarded_bytes
        return CachedPlan.of(plan, self.pattern, profile, near, doubtful=doubtful)

    def shelved(self, cached: CachedPlan) -> Shelved:
        return Shelved(self.size, self.available_bytes, cached)


class Decision(NamedTuple):
    """The plan for a step, and at which of its runs to compare memory with the timeline."""

    cached: CachedPlan
    available_bytes: int
    watched: range
    new: bool
    kind: Kind | None = None

    def keeping_nothing(self) -> Decision:
        """The same step with every run recomputed."""
        again = dict.fromkeys(self.cached.again, True)
        plan, profile = self.cached.plan, self.cached.profile
        if profile is not None:
            plan = Plan.of(profile, tuple(again.values()), self.available_bytes)
        cached = replace(self.cached, plan=plan, again=again, guarded=frozenset())
        return self._replace(cached=cached, watched=range(0), kind=None)

    def with_choices(self, again: Mapping[Run, bool]) -> Decision:
        """The same step under other choices. Nobody watches it: they are not to be corrected."""
        plan, profile = self.cached.plan, self.cached.profile
        choices = tuple(again.values())
        if choices == plan.recompute:
            return self._replace(watched=range(0))
        if profile is not None:
            plan = Plan.of(profile, choices, self.available_bytes)
        return self._replace(cached=CachedPlan(plan, again, profile), watched=range(0))
