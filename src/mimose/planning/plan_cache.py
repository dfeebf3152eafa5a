"""The cache that hands plans out again: for the same size, and for sizes between two that agree."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from mimose.costs import InputSize, Pattern, Profile, Run, levels
from mimose.planning.plan import Plan

_MOST_ON_SHELF, _MOST_SHELVES = 256, 64
_SLACK = 10
"""By what power of two the bytes are divided that may be available beyond a smaller size's."""
_CLOSE = 0.004
"""How far the costs of a shared plan may lie above the real ones, as a share of its peak."""


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan, and its choices by run, ready for use."""

    plan: Plan
    again: Mapping[Run, bool]
    profile: Profile | None = None
    """What the plan was made from."""
    guarded: frozenset[Run] = frozenset()
    """Kept runs whose forward comes near the limit."""
    doubtful: bool = False
    """Whether steps under it had better be watched."""
    exact: bool = True
    """Whether its costs are about those of the size that it is handed out for."""

    @property
    def keeps_all(self) -> bool:
        return True not in self.plan.recompute

    @classmethod
    def of(
        cls,
        plan: Plan,
        pattern: Pattern,
        profile: Profile | None = None,
        near_bytes: int | None = None,
        *,
        doubtful: bool = False,
    ) -> CachedPlan:
        """A plan for steps of this pattern.

        Kept runs that take the step beyond `near_bytes` in their forward are guarded.
        """
        guarded: frozenset[Run] = frozenset()
        if profile is not None and near_bytes is not None and plan.peak_bytes > near_bytes:
            peaks = zip(pattern, profile.runs, levels(profile, plan.recompute), strict=True)
            near = {run for run, cost, level in peaks if level + cost.spike > near_bytes}
            guarded = frozenset(near)
        again = dict(zip(pattern, plan.recompute, strict=True))
        return cls(plan, again, profile, guarded, doubtful)


class Shelved(NamedTuple):
    """A plan for a size, made when so much was available."""

    size: InputSize
    available_bytes: int
    cached: CachedPlan

    @property
    def plan(self) -> Plan:
        return self.cached.plan


def _at(size: InputSize, below: Shelved, above: Shelved) -> CachedPlan:
    """The plan that two sizes have in common, for one in between.

    Its costs are put on the line between theirs: memory grows ever faster with size, so they are
    hardly higher than they will be; or much higher, if the two lie far apart.
    """
    if size == above.size:
        return above.cached
    shares = size.shares_between(below.size, above.size) or [1.0]
    share = max(shares)
    ends = zip(below.size.dims, above.size.dims, strict=True)
    apart = max(((high - low) / (high + low) for low, high in ends if high > low), default=0.0)
    low, high = below.plan, above.plan
    rise = high.peak_bytes - low.peak_bytes
    seconds = low.recompute_seconds + share * (high.recompute_seconds - low.recompute_seconds)
    plan = Plan(high.recompute, low.peak_bytes + math.ceil(share * rise), seconds, fits=True)
    # The most by which a parabola through both lies below the line; and dimensions that lie lower
    # than the one that counts.
    above_real = (apart / 4 + share - min(shares)) * rise
    exact = above_real <= _CLOSE * high.peak_bytes and below.cached.exact and above.cached.exact
    return replace(above.cached, plan=plan, exact=exact)


class Shelf:
    """Plans of one kind of step, by input size.

    Memory grows with size. So if a smaller and a larger size have the same choices, the sizes in
    between have them, too: where the larger one would fit they fit, and with no more available than
    the smaller one had nothing cheaper does.
    """

    def __init__(self) -> None:
        self._volumes: list[int] = []
        self._plans: list[Shelved] = []

    def put(self, plan: Shelved) -> None:
        """One more plan; another one for the same size no longer counts."""
        if len(self._plans) >= _MOST_ON_SHELF:
            self._volumes, self._plans = [], []
        volume = sum(plan.size.dims)
        at = bisect_left(self._volumes, volume)
        known = at < len(self._plans) and self._plans[at].size == plan.size
        self._volumes[at : at + known] = [volume]
        self._plans[at : at + known] = [plan]

    def between(self, size: InputSize, available_bytes: int) -> CachedPlan | None:
        """The plan of the next larger size, if the next smaller one has the same choices.

        What is available may be a little more than for the smaller one: it is rounded, and hardly
        anything that did not fit there fits here.
        """
        at = bisect_left(self._volumes, sum(size.dims))
        if at == len(self._plans):
            return None
        above = self._plans[at]
        if above.plan.peak_bytes > available_bytes or not size <= above.size:
            return None
        below = self._plans[at - 1] if at and above.size != size else above
        agree = below.plan.recompute == above.plan.recompute and below.size <= size
        if above.cached.keeps_all:  # nothing is cheaper
            return _at(size, below, above) if agree else replace(above.cached, exact=False)
        most = below.available_bytes
        enough = agree and available_bytes <= most + (most >> _SLACK)
        return _at(size, below, above) if enough else None

    def forget_doubtful(self) -> None:
        """Only what is certain stays."""
        self._plans = [entry for entry in self._plans if not entry.cached.doubtful]
        self._volumes = [sum(entry.size.dims) for entry in self._plans]


class PlanCache:
    """Plans by what they were made for; the one that was not asked for the longest goes first."""

    def __init__(self, capacity: int = 512) -> None:
        self._plans: OrderedDict[Hashable, CachedPlan] = OrderedDict()
        self._shelves: dict[Hashable, Shelf] = {}
        self._capacity = capacity
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> CachedPlan | None:
        """The plan for `key`, if there is one."""
        plan = self._plans.get(key)
        if plan is None:
            return None
        self.hits += 1
        self._plans.move_to_end(key)
        return plan

    def between(self, kind: Hashable, size: InputSize, available_bytes: int) -> CachedPlan | None:
        """The plan that a smaller and a larger size in steps of this kind have in common."""
        shelf = self._shelves.get(kind)
        return None if shelf is None else shelf.between(size, available_bytes)

    def put(self, key: Hashable, cached: CachedPlan, *, new: bool = True) -> None:
        """Remember a plan: a new one, or one that another size has, too."""
        self.misses += new
        self.hits += not new
        self._plans[key] = cached
        if len(self._plans) > self._capacity:
            self._plans.popitem(last=False)

    def shelve(self, kind: Hashable, plan: Shelved) -> None:
        """Let sizes between this one and others share plans."""
        if kind not in self._shelves and len(self._shelves) >= _MOST_SHELVES:
            self._shelves.clear()
        self._shelves.setdefault(kind, Shelf()).put(plan)

    def forget_doubtful(self) -> None:
        """Forget plans that may become better now that more is known."""
        self._plans = OrderedDict((k, p) for k, p in self._plans.items() if not p.doubtful)
        for shelf in self._shelves.values():
            shelf.forget_doubtful()

    def clear(self) -> None:
        """Forget every plan; the counts stay."""
        self._plans.clear()
        self._shelves.clear()
