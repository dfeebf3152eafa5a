"""The least extra time that fits."""

from __future__ import annotations

from typing import final

from mimose.costs import Option, Profile, RunCost
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner
from mimose.planning.planners.pareto import cheapest, menus_of
from mimose.planning.planners.strictest import strictest
from mimose.planning.planners.with_transfers import with_transfers


@final
class Optimal(Planner):
    """The plan with the least extra time whose timeline fits.

    One scan over the runs in forward order. Later runs feel a single number of earlier choices, the
    bytes held so far, and less is never worse; so of all prefixes only those matter that no other
    prefix beats in both held bytes and time (a Pareto front). A prefix that cannot be completed is
    dropped; one from which all the rest can be kept is completed at once, and bounds the others.
    Equal blocks make the front tiny: one entry for each number of blocks kept. Among plans of equal
    time the earlier block is recomputed, since what is kept early burdens all that follows.

    It finds a plan whenever one fits. The time is exact while the front stays under some thousands
    of prefixes, as it does even for 96 blocks that all differ; past that, within 0.5 % of exact.
    If nothing fits, everything is recomputed that saves anything.

    Under autocast runs hold a little less in the forwards than in the backwards. Prefixes carry
    both numbers and are checked against both, but compared by the latter alone: exact where the
    casts of blocks are equal. Options whose bytes leave the device in between are not searched,
    since their costs are not local.
    """

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        choices = cheapest(menus_of(profile), profile, available_bytes)
        if profile.link is not None and (choices is None or not set(choices) <= {Option.KEEP}):
            choices = with_transfers(profile, available_bytes, choices)
        if choices is not None:
            return Plan.of(profile, choices, available_bytes)
        # Nothing fits: what would save nothing is not recomputed either.
        helps = Plan.of(profile, map(_strictest_that_helps, profile.runs), available_bytes)
        if profile.link is None:
            return helps
        return min(helps, strictest(profile, available_bytes), key=lambda plan: plan.peak_bytes)


def _strictest_that_helps(run: RunCost) -> Option:
    """The last option of the menu, unless the first one takes no more memory, here or later."""
    first, last = run.menu[0], run.menu[-1]
    need, least = max(first[1:3]), max(last[1:3])
    return last.option if first.backward_held > 0 or need > least else first.option
