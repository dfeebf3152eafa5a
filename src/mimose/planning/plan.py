"""Plans: what each run of a step does, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mimose.costs import Option, Profile, Transfer, extra_nanoseconds, peak


@dataclass(frozen=True, slots=True)
class Plan:
    """One option for each run, and what that costs by its profile."""

    choices: tuple[Option, ...]
    peak_bytes: int
    """Predicted peak above the step's start."""
    extra_seconds: float
    """Time that the choices add to the step."""
    fits: bool
    """Whether the predicted peak is within what was available."""
    transfers: tuple[Transfer, ...] = ()
    """The runs whose bytes wait in host memory, in forward order."""
    stall_seconds: float = 0.0
    """The part of `extra_seconds` in which the device waits for transfers."""

    @classmethod
    def of(cls, profile: Profile, choices: Iterable[Option | bool], available_bytes: int) -> Plan:
        """The plan that makes these choices; True stands for recompute, False for keep."""
        chosen = tuple(map(Option.of, choices))
        highest = peak(profile, chosen)
        seconds = extra_nanoseconds(profile, chosen) / 1e9
        return cls(chosen, highest, seconds, highest <= available_bytes)

    def count(self, option: Option) -> int:
        """How many runs have this option."""
        return self.choices.count(option)

    @property
    def kept(self) -> int:
        """How many runs are kept."""
        return self.count(Option.KEEP)

    @property
    def recomputed(self) -> int:
        """How many runs are recomputed."""
        return self.count(Option.RECOMPUTE) + self.count(Option.RECOMPUTE_FROM_HOST)

    @property
    def moved_bytes(self) -> int:
        """Bytes that are copied to host memory, and back again."""
        return sum(transfer.moved_bytes for transfer in self.transfers)

    @property
    def host_bytes(self) -> int:
        """The most bytes in host memory at once: when the backward begins, all of them."""
        return self.moved_bytes

    @property
    def keeps_all(self) -> bool:
        """Whether every run is kept."""
        return self.kept == len(self.choices)

    def __str__(self) -> str:
        return "".join(option.letter for option in self.choices)


NO_PLAN = Plan((), 0, 0.0, fits=False)
"""For steps of which nothing is known: whatever runs is recomputed."""
