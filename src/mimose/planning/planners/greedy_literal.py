"""The paper's scheduler, read literally."""

from __future__ import annotations

from typing import final

from mimose.costs import Profile
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner
from mimose.planning.planners.greedy import buckets_of, excess_of


@final
class GreedyLiteral(Planner):
    """The Mimose paper's Algorithm 1 as its pseudo-code is written.

    Buckets of layers whose bytes differ by at most 10 % are kept in descending order. While there
    is an excess, the buckets whose largest member is greater than the excess qualify, and the top
    of them is taken: the largest. If none qualifies, the layer comes from the largest bucket, too.
    In a bucket, the layer that runs first is taken.

    So the largest bucket always gives the next layer, whether one qualifies or not, and the plan is
    simply the largest layers until the excess is gone. `Greedy` is the reading that the paper's
    text supports: the layer nearest to the excess. Like that one, this planner only adds up bytes,
    and its plans may exceed the budget.
    """

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        recompute = [False] * len(profile.runs)
        excess = excess_of(profile, available_bytes)
        for bucket in buckets_of(profile):
            for k, run in bucket:
                if excess <= 0:
                    break
                recompute[k] = True
                excess -= run.saved
        return Plan.of(profile, recompute, available_bytes)
