"""What a static tool does to inputs of varying size."""

from __future__ import annotations

from typing import final

from mimose.costs import Option, Profile
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner
from mimose.planning.planners.optimal import Optimal


@final
class Static(Planner):
    """One plan for all sizes: another planner's, frozen at the largest size seen so far.

    This is the paper's Sublinear baseline as its authors ran it: safe for the largest input, and
    on all others it recomputes what would have fitted.
    """

    def __init__(self, planner: Planner | None = None) -> None:
        self._planner = planner or Optimal()
        self._frozen: tuple[Option, ...] = ()
        self._largest = -1

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        volume = sum(run.saved for run in profile.runs)
        if volume > self._largest or len(self._frozen) != len(profile.runs):
            self._largest = volume
            self._frozen = self._planner.plan(profile, available_bytes).choices
        return Plan.of(profile, self._frozen, available_bytes)
