"""The cache that hands plans out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from mimose.costs import Option, Pattern, Profile, Run, levels
from mimose.estimation import State
from mimose.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan, and its choices by run, ready for use."""

    plan: Plan
    choices: dict[Run, Option]
    """In the order of the pattern; shared between steps, and never written to."""
    profile: Profile | None = None
    """What the plan was made from."""
    guarded: frozenset[Run] = frozenset()
    """Kept runs whose forward comes near the limit."""
    exact: bool = True
    """Whether its costs are predicted for its size, rather than bounded by those of others."""
    state: State = State.TRUSTED
    """How far the prediction that it was made from can be relied on."""

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
        """A plan for steps of this pattern.

        Kept runs that take the step beyond `near_bytes` in their forward are guarded.
        """
        guarded: frozenset[Run] = frozenset()
        if plan.peak_bytes > near_bytes:
            starts = zip(pattern, profile.runs, levels(profile, plan.choices)[0], strict=True)
            near = {run for run, cost, start in starts if start + cost.recompute_peak > near_bytes}
            guarded = frozenset(near)
        choices = dict(zip(pattern, plan.choices, strict=True))
        return cls(plan, choices, profile, guarded, exact, state)


class PlanCache:
    """Plans by what they were made for; the least recently used one goes first."""

    def __init__(self, capacity: int = 512) -> None:
        self._plans: OrderedDict[Hashable, CachedPlan] = OrderedDict()
        self._capacity = capacity
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> CachedPlan | None:
        """The plan for `key`, if there is one."""
        plan = self._plans.get(key)
        if plan is not None:
            self.hits += 1
            self._plans.move_to_end(key)
        return plan

    def put(self, key: Hashable, cached: CachedPlan) -> None:
        """Remember a new plan."""
        self.misses += 1
        self._plans[key] = cached
        if len(self._plans) > self._capacity:
            self._plans.popitem(last=False)

    def clear(self) -> None:
        """Forget every plan; the counts stay."""
        self._plans.clear()
