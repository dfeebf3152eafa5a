"""Plans, and the cache that hands them out again."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from mimose.inputs import InputSize
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
    doubtful: bool = False
    """Whether steps under it had better be watched."""


class Shelf:
    """Plans of one kind of step, by input size.

    Memory grows with size. So if a smaller and a larger size have the same choices, the sizes in
    between have them, too: with no less available than the larger one had they fit, and with no
    more than the smaller one had nothing cheaper does.
    """

    def __init__(self) -> None:
        self._volumes: list[int] = []
        self._plans: list[tuple[InputSize, int, CachedPlan]] = []

    def put(self, size: InputSize, available_bytes: int, plan: CachedPlan) -> None:
        volume = sum(size.dims)
        at = bisect_left(self._volumes, volume)
        if at < len(self._plans) and self._plans[at][0] == size:
            self._plans[at] = (size, available_bytes, plan)
            return
        if len(self._plans) >= _MOST_ON_SHELF:
            self._volumes, self._plans, at = [], [], 0
        self._volumes.insert(at, volume)
        self._plans.insert(at, (size, available_bytes, plan))

    def between(self, size: InputSize, available_bytes: int) -> CachedPlan | None:
        """The plan of the next larger size, if the next smaller one has the same choices."""
        at = bisect_left(self._volumes, sum(size.dims))
        if not 0 < at < len(self._plans):
            return None
        smaller, most, below = self._plans[at - 1]
        larger, least, above = self._plans[at]
        same = below.plan.recompute == above.plan.recompute and above.plan.fits
        if same and least <= available_bytes <= most and smaller <= size <= larger:
            return above
        return None

    def forget_doubtful(self) -> None:
        """Only what is certain stays."""
        self._plans = [entry for entry in self._plans if not entry[2].doubtful]
        self._volumes = [sum(size.dims) for size, _, _ in self._plans]


_MOST_ON_SHELF, _MOST_SHELVES = 256, 64


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
        plan = None if shelf is None else shelf.between(size, available_bytes)
        self.hits += plan is not None
        return plan

    def shelve(
        self, kind: Hashable, size: InputSize, available_bytes: int, plan: CachedPlan
    ) -> None:
        """Let sizes between this one and others share its plan."""
        if kind not in self._shelves and len(self._shelves) >= _MOST_SHELVES:
            self._shelves.clear()
        self._shelves.setdefault(kind, Shelf()).put(size, available_bytes, plan)

    def put(
        self,
        key: Hashable,
        plan: Plan,
        pattern: Pattern,
        profile: Profile | None = None,
        near_bytes: int | None = None,
        *,
        doubtful: bool = False,
    ) -> CachedPlan:
        """Remember `plan`, made for steps of this pattern.

        Kept runs that take the step beyond `near_bytes` in their forward are guarded.
        """
        guarded: frozenset[Run] = frozenset()
        if profile is not None and near_bytes is not None and plan.peak_bytes > near_bytes:
            peaks = zip(pattern, profile.runs, levels(profile, plan.recompute), strict=True)
            near = {run for run, cost, level in peaks if level + cost.spike > near_bytes}
            guarded = frozenset(near)
        self.misses += 1
        again = dict(zip(pattern, plan.recompute, strict=True))
        cached = CachedPlan(plan, again, profile, guarded, doubtful)
        self._plans[key] = cached
        if len(self._plans) > self._capacity:
            self._plans.popitem(last=False)
        return cached

    def forget_doubtful(self) -> None:
        """Forget plans that more knowledge may make better."""
        self._plans = OrderedDict((k, p) for k, p in self._plans.items() if not p.doubtful)
        for shelf in self._shelves.values():
            shelf.forget_doubtful()

    def clear(self) -> None:
        """Forget every plan; the counts stay."""
        self._plans.clear()
        self._shelves.clear()
