"""The interface of planners."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mimose.costs import Profile
from mimose.planning.plan import Plan


class Planner(ABC):
    """A pure function from a profile and the bytes available to a plan."""

    version = 0
    """Changes when plans made before are out of date."""

    @abstractmethod
    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        """Choose an option for each run so that the step peaks at most `available_bytes` above its
        start."""
