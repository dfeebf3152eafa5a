"""Plans: what each run of a step does, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mimose.costs import Moments, Option, OptionCost, Profile, Transfer, costs_of


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
        """The plan that makes these choices; True stands for recompute, False for keep.

        A choice to move bytes that cannot be moved is replaced by one that the run has.
        """
        chosen = tuple(map(Option.of, choices))
        moments = Moments(profile, costs_of(profile, chosen))
        transfers, stall = moments.schedule
        seconds = moments.extra_nanoseconds / 1e9
        fits = moments.peak <= available_bytes
        if any(option.moves for option in chosen):
            chosen = tuple(_chosen(o, cost) for o, cost in zip(chosen, moments.costs, strict=True))
            fits = fits and _on_host(profile, transfers)
        return cls(chosen, moments.peak, seconds, fits, transfers, stall / 1e9)

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


def _chosen(option: Option, cost: OptionCost) -> Option:
    return cost.option if option.moves else option


def _on_host(profile: Profile, transfers: tuple[Transfer, ...]) -> bool:
    """Whether the host can hold all that moves."""
    moved = sum(transfer.moved_bytes for transfer in transfers)
    return profile.link is None or moved <= profile.link.host_bytes


NO_PLAN = Plan((), 0, 0.0, fits=False)
"""For steps of which nothing is known: whatever runs is recomputed."""
