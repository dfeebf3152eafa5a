"""Cache plans by the conditions, and by the available bytes, that they are good for."""

from __future__ import annotations

import sys
from collections import OrderedDict
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
    serves: range = range(sys.maxsize)
    """The available bytes for which it is the plan to use."""
    evictable: frozenset[Run] = frozenset()
    """Kept runs whose activations may be evicted in a step that is not measured."""

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
        serves: range = range(sys.maxsize),
        evictable: frozenset[Run] = frozenset(),
    ) -> CachedPlan:
        """The cached form of a plan for steps with this pattern.

        Kept runs whose forward peaks above `near_bytes` are guarded.
        """
        guarded: frozenset[Run] = frozenset()
        if plan.peak_bytes > near_bytes:
            starts = zip(pattern, profile.runs, levels(profile, plan.choices).forward, strict=True)
            near = {run for run, cost, start in starts if start + cost.recompute_peak > near_bytes}
            guarded = frozenset(near)
        choices = dict(zip(pattern, plan.choices, strict=True))
        return cls(plan, choices, profile, guarded, exact, state, serves, evictable)


class PlanCache:
    """Plans by conditions and available bytes; the least recently used one is dropped first."""

    def __init__(self, capacity: int = 512) -> None:
        self._plans: OrderedDict[Hashable, list[CachedPlan]] = OrderedDict()
        """By conditions; those used last come last, and of each the newest plan comes first."""
        self._capacity = capacity
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return sum(map(len, self._plans.values()))

    def get(self, conditions: Hashable, available_bytes: int = 0) -> CachedPlan | None:
        """A plan for these conditions that serves these bytes; None if there is none."""
        plans = self._plans.get(conditions, ())
        for plan in plans:
            if available_bytes in plan.serves:
                self.hits += 1
                self._plans.move_to_end(conditions)
                return plan
        return None

    def put(self, conditions: Hashable, cached: CachedPlan) -> None:
        """Store a new plan. It replaces those that serve no other bytes than it does."""
        self.misses += 1
        others = self._plans.pop(conditions, [])
        kept = [other for other in others if not _within(other.serves, cached.serves)]
        self._plans[conditions] = [cached, *kept]
        if len(self) > self._capacity:
            oldest = self._plans[next(iter(self._plans))]
            oldest.pop()
            if not oldest:
                del self._plans[next(iter(self._plans))]

    def drop_untrusted(self) -> None:
        """Drop the plans that were made from predictions that are not trusted."""
        for conditions, plans in list(self._plans.items()):
            plans[:] = [plan for plan in plans if plan.trusted]
            if not plans:
                del self._plans[conditions]

    def clear(self) -> None:
        """Drop all plans; the counts of hits and misses stay."""
        self._plans.clear()


def _within(one: range, other: range) -> bool:
    return other.start <= one.start and one.stop <= other.stop
