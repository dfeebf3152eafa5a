"""The default planner: the least extra time that fits."""

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

    Without a link to the host, one scan over the runs in forward order finds it exactly
    (`pareto.py`), and finds a plan whenever one fits. Equal blocks make the scan fast: there is one
    prefix for each number of kept blocks. Of plans with equal time, the one that recomputes earlier
    blocks is chosen, since bytes kept early are in use for all later blocks.

    With a link, a search around the scan chooses the runs whose bytes move (`with_transfers.py`).
    It is not exact, but nearly always within 2 % of the best step time. The plan never takes more
    time than without the link, and is the same if transfers gain almost nothing. The search takes
    at most about 1 % of the step's time: the shorter the step, the less thorough it is.

    If nothing fits, every run is recomputed for which that saves memory; with a link, the plan with
    the smaller peak of this one and `strictest` is used.
    """

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        choices = cheapest(menus_of(profile), profile, available_bytes)
        if profile.link is not None and (choices is None or not set(choices) <= {Option.KEEP}):
            choices = with_transfers(profile, available_bytes, choices)
        if choices is not None:
            return Plan.of(profile, choices, available_bytes)
        recomputed = Plan.of(profile, map(_recompute_if_smaller, profile.runs), available_bytes)
        if profile.link is None:
            return recomputed
        return min(
            recomputed, strictest(profile, available_bytes), key=lambda plan: plan.peak_bytes
        )


def _recompute_if_smaller(run: RunCost) -> Option:
    """The last option of the menu, unless the first one takes no more memory during the step."""
    keep, recompute = run.menu[0], run.menu[-1]
    lower_peak = max(recompute.forward_peak, recompute.backward_peak) < max(
        keep.forward_peak, keep.backward_peak
    )
    return recompute.option if keep.backward_held > 0 or lower_peak else keep.option
