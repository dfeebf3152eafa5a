"""The paper's scheduler."""

from __future__ import annotations

from typing import final

from mimose.costs import Profile, RunCost
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner


@final
class Greedy(Planner):
    """The Mimose paper's Algorithm 1, in one reading of it.

    The excess is the bytes of all activations together over what is available. Layers are sorted by
    their bytes into buckets whose members differ by at most 10 %. While there is an excess, take
    the layer nearest to it: from the bucket with the smallest bytes that still cover the excess, or
    from the largest bucket if none does; in a bucket, the layer that runs first.

    The paper's text and its pseudo-code disagree, and this is neither to the letter. The text asks
    for the smallest distance to the excess. The pseudo-code, read literally, takes the top of
    buckets in descending order (the largest that covers the excess), judges a bucket by its largest
    member, and wants more than the excess: that is `GreedyLiteral`. Here the smallest bucket that
    covers it is taken, judged by the member that would be taken, and just the excess is enough: one
    layer suffices where one can, and no larger one than needed.

    It ignores peaks inside a block, the order in which memory is used, and the memory that a
    recompute itself needs. So its plans may exceed the budget, which comparisons are meant to show.
    """

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        recompute = [False] * len(profile.runs)
        excess = excess_of(profile, available_bytes)
        buckets = buckets_of(profile)
        while excess > 0 and buckets:
            covering = [bucket for bucket in buckets if bucket[0][1].saved >= excess]
            bucket = covering[-1] if covering else buckets[0]
            k, run = bucket.pop(0)
            if not bucket:
                buckets.remove(bucket)
            recompute[k] = True
            excess -= run.saved
        return Plan.of(profile, recompute, available_bytes)


def excess_of(profile: Profile, available_bytes: int) -> int:
    """The bytes of all activations together over what is available."""
    held = sum(run.held for run in profile.runs if not run.fixed)
    return profile.head + held - available_bytes


def buckets_of(profile: Profile) -> list[list[tuple[int, RunCost]]]:
    """Buckets of (index, run), the largest bytes first; in a bucket, in order of execution."""
    runs = [(k, run) for k, run in enumerate(profile.runs) if not run.fixed]
    buckets: list[list[tuple[int, RunCost]]] = []
    largest = 0
    for k, run in sorted(runs, key=lambda pair: -pair[1].saved):
        if buckets and run.saved >= 0.9 * largest:
            buckets[-1].append((k, run))
        else:
            buckets.append([(k, run)])
            largest = run.saved
    return [sorted(bucket, key=lambda pair: pair[0]) for bucket in buckets]
