"""Plans: one option for each run of a step, and the resulting cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mimose.costs import Moments, Option, Profile, Transfer, costs_of
from mimose.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Plan:
    """One option for each run, and the predicted cost of these choices."""

    choices: tuple[Option, ...]
    peak_bytes: int
    """Predicted peak, above the memory in use at the step's start."""
    extra_seconds: float
    """Time that the choices add to the step."""
    fits: bool
    """Whether the peak is within the available bytes, and moved bytes within the host's."""
    transfers: tuple[Transfer, ...] = ()
    """The runs whose bytes move to host memory, in forward order."""
    stall_seconds: float = 0.0
    """The part of `extra_seconds` that the device waits for transfers."""

    @classmethod
    def of(cls, profile: Profile, choices: Iterable[Option | bool], available_bytes: int) -> Plan:
        """The plan with these choices; True stands for recompute, False for keep.

        If a run cannot move the bytes that its choice moves, it gets another option (`costs_of`).
        """
        options = tuple(map(Option.of, choices))
        if len(options) != len(profile.runs):
            raise ArgumentError(
                f"choices has {len(options)} entries, but profile.runs has {len(profile.runs)}: "
                "give one choice for each run"
            )
        costs = costs_of(profile, options)
        moments = Moments(profile, costs)
        transfers, stall = moments.schedule
        fits = moments.peak <= available_bytes
        if any(option.moves for option in options):
            pairs = zip(options, costs, strict=True)
            options = tuple(cost.option if option.moves else option for option, cost in pairs)
            moved = sum(transfer.moved_bytes for transfer in transfers)
            fits = fits and (profile.link is None or moved <= profile.link.host_bytes)
        seconds = moments.extra_nanoseconds / 1e9
        return cls(options, moments.peak, seconds, fits, transfers, stall / 1e9)

    def count(self, option: Option) -> int:
        """The number of runs with this option."""
        return self.choices.count(option)

    @property
    def kept(self) -> int:
        """The number of runs that are kept."""
        return self.count(Option.KEEP)

    @property
    def recomputed(self) -> int:
        """The number of runs that are recomputed, with their input on the device or on the host."""
        return self.count(Option.RECOMPUTE) + self.count(Option.RECOMPUTE_FROM_HOST)

    @property
    def moved_bytes(self) -> int:
        """Bytes that are copied to host memory and back."""
        return sum(transfer.moved_bytes for transfer in self.transfers)

    @property
    def host_bytes(self) -> int:
        """The most bytes in host memory at once: all moved bytes, when the backward begins."""
        return self.moved_bytes

    @property
    def keeps_all(self) -> bool:
        """Whether every run is kept."""
        return self.kept == len(self.choices)

    def __str__(self) -> str:
        return "".join(option.letter for option in self.choices)


NO_PLAN = Plan((), 0, 0.0, fits=False)
"""For steps of unknown cost: every block is recomputed."""
