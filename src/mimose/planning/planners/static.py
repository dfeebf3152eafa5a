"""The baseline of static checkpointing on inputs of varying size."""

from __future__ import annotations

from typing import final

from mimose.costs import InputSize, Option, Profile
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner
from mimose.planning.planners.optimal import Optimal


@final
class Static(Planner):
    """One plan for all sizes: another planner's plan for the largest size so far.

    This is the paper's Sublinear baseline as its authors ran it. It is safe for the largest input,
    and recomputes more than necessary on all others. The plan is made again if other costs become
    known for that input, as they do after the first step.
    """

    def __init__(self, planner: Planner | None = None) -> None:
        self._planner = planner or Optimal()
        self._frozen: tuple[Option, ...] = ()
        self._largest: InputSize | None = None
        self._largest_saved = -1

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        saved = sum(run.saved for run in profile.runs)
        is_largest = saved > self._largest_saved or profile.size == self._largest
        if is_largest or len(self._frozen) != len(profile.runs):
            self._largest, self._largest_saved = profile.size, saved
            choices = self._planner.plan(profile, available_bytes).choices
            if choices != self._frozen:
                self._frozen = choices
                self.version += 1
        return Plan.of(profile, self._frozen, available_bytes)
