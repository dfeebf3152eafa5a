"""What every planner is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mimose.costs import Profile
from mimose.planning.plan import Plan


class Planner(ABC):
    """A pure function from a profile and the bytes available to a plan."""

    shares = False
    """Whether sizes between two that have the same plan may share it without being planned for."""

    @abstractmethod
    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        """Choose what to recompute so that the step stays `available_bytes` above its start."""
