"""Schedules: what a step does, operation by operation.

A plan makes one choice for each run. A schedule says more: it may drop the inputs of runs, rebuild
them from an earlier one, recompute a run several times, or move bytes off the device for a while.
Two things of each run can be on the device: its input (for run k + 1, the output of run k) and its
activations.

    Forward(k, keep)     first forward of run k: needs its input, gives the input of run k + 1, and
                         with `keep` the activations of run k
    Recompute(k, keep)   the same once more, in its own time
    Drop(item, k)        frees the input or the activations of run k
    Move(item, k, ...)   moves one of them off the device, or back
    Backward(k)          needs the activations of run k; frees them, and its input

Forwards run from first to last, then the model's head, then backwards from last to first. The head
runs before the first recompute or backward that follows the last forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from mimose.costs import Option, Profile
from mimose.errors import ArgumentError


class Item(Enum):
    """What a run can have on the device."""

    INPUT = "input"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class Forward:
    """The first forward of a run."""

    run: int
    keep: bool
    """Whether its activations stay."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Another forward of a run."""

    run: int
    keep: bool


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a run."""

    run: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free something. The input of a run whose activations are there is freed as far as the run
    does not save it."""

    item: Item
    run: int


@dataclass(frozen=True, slots=True)
class Move:
    """Move something to the host, or back to the device."""

    item: Item
    run: int
    to_device: bool


Operation: TypeAlias = Forward | Recompute | Backward | Drop | Move
Schedule: TypeAlias = tuple[Operation, ...]


class ScheduleError(ArgumentError):
    """A schedule does something impossible."""

    def __init__(self, index: int, operation: Operation | None, problem: str) -> None:
        what = f"operation {index}, {operation}" if operation else "the end of the schedule"
        super().__init__(f"{what}: {problem}")


def schedule_of(profile: Profile, choices: Sequence[Option]) -> Schedule:
    """The schedule that does what a plan does: one option for each run."""
    forwards: list[Operation] = []
    backwards: list[Operation] = []
    for k, (run, option) in enumerate(zip(profile.runs, choices, strict=True)):
        keep = option is Option.KEEP or run.fixed
        forwards.append(Forward(k, keep))
        if keep and not run.fixed:
            forwards.append(Drop(Item.INPUT, k))
        again: list[Operation] = [] if keep else [Recompute(k, keep=True)]
        backwards[:0] = [*again, Backward(k)]
    return (*forwards, *backwards)
