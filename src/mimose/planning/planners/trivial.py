"""The two trivial planners: keep everything, recompute everything."""

from __future__ import annotations

from typing import final

from mimose.costs import Option, Profile
from mimose.planning.plan import Plan
from mimose.planning.planners.base import Planner


@final
class KeepAll(Planner):
    """Save every activation: training without checkpointing."""

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        return Plan.of(profile, [Option.KEEP] * len(profile.runs), available_bytes)


@final
class RecomputeAll(Planner):
    """Recompute every block that can be recomputed."""

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        return Plan.of(profile, [not run.fixed for run in profile.runs], available_bytes)
