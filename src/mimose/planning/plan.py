"""Plans: what a step recomputes, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from mimose.costs import Profile, peak, recompute_nanoseconds


@dataclass(frozen=True, slots=True)
class Plan:
    """For each run, whether it is recomputed; and what that costs by its profile."""

    recompute: tuple[bool, ...]
    peak_bytes: int
    """Predicted peak above the step's start."""
    recompute_seconds: float
    fits: bool
    """Whether the predicted peak is within what was available."""

    @classmethod
    def of(cls, profile: Profile, recompute: tuple[bool, ...], available_bytes: int) -> Plan:
        """The plan that recomputes these runs."""
        highest = peak(profile, recompute)
        seconds = recompute_nanoseconds(profile, recompute) / 1e9
        return cls(recompute, highest, seconds, highest <= available_bytes)

    @property
    def kept(self) -> int:
        """How many runs are kept."""
        return len(self.recompute) - sum(self.recompute)

    def __str__(self) -> str:
        return "".join("r" if again else "K" for again in self.recompute)
