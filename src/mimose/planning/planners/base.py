"""What every planner is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mimose.costs import Profile
from mimose.planning.plan import Plan


class Planner(ABC):
    """A pure function from a profile and the bytes available to a plan."""

    @abstractmethod
    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        """Choose an option for each run; the step may rise `available_bytes` above its start."""
