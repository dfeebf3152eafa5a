"""Cache plans by the conditions that they were made for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from mimose.costs import Option, Pattern, Profile, Run, levels
from mimose.estimation import State
from mimose.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan in the form that steps use: its choices by run, and how far to rely on it."""

    plan: Plan
    choices: dict[Run, Option]
    """In the order of the pattern; shared between steps, and never written to."""
    profile: Profile | None = None
    """The profile that the plan was made from."""
    guarded: frozenset[Run] = frozenset()
    """Kept runs whose forward peaks near the limit: if one runs out of memory, it is recomputed."""
    exact: bool = True
    """Whether its profile is predicted for its size, rather than the bound by a larger size."""
    state: State = State.TRUSTED
    """The state of the prediction that the plan was made from."""

    @property
    def trusted(self) -> bool:
        return self.state is State.TRUSTED

    @classmethod
    def of(
        cls,
        plan: Plan,
        pattern: Pattern,
        profile: Profile,
        near_bytes: int,
        *,
        exact: bool = True,
        state: State = State.TRUSTED,
    ) -> CachedPlan:
        """The cached form of a plan for steps with this pattern.

        Kept runs whose forward peaks above `near_bytes` are guarded.
        """
        guarded: frozenset[Run] = frozenset()
        if plan.peak_bytes > near_bytes:
            starts = zip(pattern, profile.runs, levels(profile, plan.choices)[0], strict=True)
            near = {run for run, cost, start in starts if start + cost.recompute_peak > near_bytes}
            guarded = frozenset(near)
        choices = dict(zip(pattern, plan.choices, strict=True))
        return cls(plan, choices, profile, guarded, exact, state)


class PlanCache:
    """Plans by key; the least recently used one is dropped first."""

    def __init__(self, capacity: int = 512) -> None:
        self._plans: dict[Hashable, CachedPlan] = {}
        """The one used last comes last."""
        self._capacity = capacity
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> CachedPlan | None:
        """The plan for a key; None if there is none."""
        plan = self._plans.pop(key, None)
        if plan is not None:
            self.hits += 1
            self._plans[key] = plan
        return plan

    def put(self, key: Hashable, cached: CachedPlan) -> None:
        """Store a new plan."""
        self.misses += 1
        self._plans[key] = cached
        if len(self._plans) > self._capacity:
            del self._plans[next(iter(self._plans))]

    def clear(self) -> None:
        """Drop all plans; the counts of hits and misses stay."""
        self._plans.clear()
