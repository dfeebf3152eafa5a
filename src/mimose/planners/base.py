"""What every planner is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mimose.plan import Plan
from mimose.timeline import Profile


class Planner(ABC):
    """A pure function from a profile and the bytes available to a plan."""

    shares = False
    """Whether sizes between two that have the same plan may share it without being planned for."""

    @abstractmethod
    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        """Choose what to recompute so that the step stays `available_bytes` above its start."""
