"""Plans, and the cache that hands them out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from mimose.observations import Pattern, Run
from mimose.timeline import Profile, levels, peak, recompute_nanoseconds


@dataclass(frozen=True, slots=True)
class Plan:
    """For each run, whether it is recomputed; and what that costs by its profile."""

    recompute: tuple[bool, ...]
    peak_bytes: int
    """Predicted peak above the step's start."""
    recompute_seconds: float
    fits: bool
    """Whether the predicted peak is within what was available."""

    @classmethod
    def of(cls, profile: Profile, recompute: tuple[bool, ...], available_bytes: int) -> Plan:
        """The plan that recomputes these runs."""
        highest = peak(profile, recompute)
        seconds = recompute_nanoseconds(profile, recompute) / 1e9
        return cls(recompute, highest, seconds, highest <= available_bytes)

    @property
    def kept(self) -> int:
        """How many runs are kept."""
        return len(self.recompute) - sum(self.recompute)

    def __str__(self) -> str:
        return "".join("r" if again else "K" for again in self.recompute)


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan, and its choices by run, ready for use."""

    plan: Plan
    again: Mapping[Run, bool]
    profile: Profile | None = None
    """What the plan was made from."""
    guarded: frozenset[Run] = frozenset()
    """Kept runs whose forward comes near the limit."""


class PlanCache:
    """Plans by what they were made for; the one that was not asked for the longest goes first."""

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
        if plan is None:
            self.misses += 1
            return None
        self.hits += 1
        self._plans.move_to_end(key)
        return plan

    def put(
        self,
        key: Hashable,
        plan: Plan,
        pattern: Pattern,
        profile: Profile | None = None,
        near_bytes: int | None = None,
    ) -> CachedPlan:
        """Remember `plan`, made for steps of this pattern.

        Kept runs that take the step beyond `near_bytes` in their forward are guarded.
        """
        guarded: frozenset[Run] = frozenset()
        if profile is not None and near_bytes is not None and plan.peak_bytes > near_bytes:
            peaks = zip(pattern, profile.runs, levels(profile, plan.recompute), strict=True)
            near = {run for run, cost, level in peaks if level + cost.spike > near_bytes}
            guarded = frozenset(near)
        again = dict(zip(pattern, plan.recompute, strict=True))
        cached = CachedPlan(plan, again, profile, guarded)
        self._plans[key] = cached
        if len(self._plans) > self._capacity:
            self._plans.popitem(last=False)
        return cached

    def clear(self) -> None:
        """Forget every plan; the counts stay."""
        self._plans.clear()
