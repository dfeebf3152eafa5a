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

    One scan over the runs in forward order finds it exactly, as long as bytes stay on the device
    (`pareto.py`). Equal blocks make that quick: one prefix for each number of blocks kept. Among
    plans of equal time the earlier block is recomputed, since what is kept early burdens all that
    follows.

    With a link to the host, which runs move is searched around the scan (`with_transfers.py`). That
    is not exact, but nearly always within 2 % of the best step time. The plan never takes more time
    than without the link, and it is the same where transfers gain next to nothing. The search takes
    about 1 % of the step's time at most, and is the less thorough the shorter the step is.

    Without a link it finds a plan whenever one fits. If nothing fits, everything is recomputed that
    saves anything; or, with a link, whatever needs the least memory.
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
