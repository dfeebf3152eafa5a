"""The two plans that need no planning."""

from __future__ import annotations

from typing import final

from mimose.costs import Profile
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner


@final
class KeepAll(Planner):
    """Save every activation: training without checkpointing."""

    shares = True

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        return Plan.of(profile, (False,) * len(profile.runs), available_bytes)


@final
class RecomputeAll(Planner):
    """Recompute every block: the least memory that whole blocks can give."""

    shares = True

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        return Plan.of(profile, tuple(not run.fixed for run in profile.runs), available_bytes)
