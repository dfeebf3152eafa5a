"""The memory of a step at each moment, computed from a profile and a plan's choices.

A profile has the costs of each run of a block at one input size. A plan chooses one option for each
run; `run_cost.py` has the cost of that option. All bytes are above the memory in use when the first
block starts. Two sums run through the step: `base`, the boundaries (inputs) of all runs up to this
one, and `held`, the bytes that the options of earlier runs hold beyond them. `held` differs between
the forwards and the backwards. The peak is the largest of

    forward of run k      base[k] + held in forward + forward_peak      for k = 0, 1, …
    after the forwards    held in forward + head_forward
                          held in backward + head_backward
    backward of run k     base[k] + held in backward + backward_peak    for k = …, 1, 0
    after the backwards   tail

With a link to the host, the activations of a run or its boundary may move to the host. They count
until their release point in the forwards, and again from their prefetch point in the backwards.
Both points, and the time that the device waits for transfers, follow from the times of all runs and
the speed of the link (`transfers.py`).

Some quantities depend on the step rather than on the size (`StepConditions`): gradients that the
step allocates, and outputs of the previous step that live until the end of the forward. A backward
with `retain_graph=True` frees nothing that a run has kept: everything held stays until the end, and
a second backward starts when all gradients exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mimose.costs.input_size import InputSize
from mimose.costs.link import Link
from mimose.costs.options import Option
from mimose.costs.run_cost import OptionCost, RunCost
from mimose.costs.transfers import NO_TRANSFERS, Schedule, schedule


class StepConditions(NamedTuple):
    """The conditions, besides its size, that a step's memory depends on."""

    gradients_allocated: tuple[int, ...] = ()
    """Bytes of gradients that the step has allocated before each run's backward."""
    all_gradients_allocated: int = 0
    """Bytes of gradients that it has allocated by the end of the backward."""
    previous_output_bytes: int = 0
    """Outputs of the previous step that are alive in the forward and freed before the backward."""
    retained: bool = False
    """Whether the backward retains the graph for another backward."""
    beside_bytes: int = 0
    """Peak of other handles' steps that run while everything that this step keeps is alive."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of all runs of a step at one input size."""

    size: InputSize
    runs: tuple[RunCost, ...]
    head_forward: int
    """Peak between the last run's forward and the return of the model."""
    head_backward: int
    """Peak between the return of the model and the first backward of a run."""
    tail: int = 0
    """Peak after the first run's backward, in the backward of embeddings. Excludes the gradients
    allocated before; the blocks hold nothing any more."""
    prelude: int | None = 0
    """Bytes that the step holds when its first block starts, such as the output of embeddings. None
    if not measured."""
    link: Link | None = None
    """The link to host memory; None if plans do not use the host."""

    @property
    def head(self) -> int:
        return max(self.head_forward, self.head_backward)

    def in_step(self, conditions: StepConditions) -> Profile:
        """The profile of a step under these conditions."""
        allocated, by_end, previous, retained, beside = conditions
        if not (previous or by_end or any(allocated) or retained or beside):
            return self
        allocated = allocated or (0,) * len(self.runs)
        runs = tuple(
            [
                run._replace(backward_entry=run.backward_entry + gradients - previous)
                for run, gradients in zip(self.runs, allocated, strict=True)
            ]
        )
        before_tail = allocated[0] if allocated else 0
        head, tail = self.head_backward - previous, self.tail + before_tail - previous
        if retained:
            head = self._highest_backward() + by_end - previous
        return Profile(
            self.size,
            runs,
            max(self.head_forward, beside),
            head,
            tail,
            self.prelude,
            None if retained else self.link,
        )

    def holding_arguments(self) -> Profile:
        """The profile if kept runs hold all their arguments, as they must to be evictable."""
        runs = self.runs
        if not any(run.droppable_input for run in runs):
            return self
        return replace(self, runs=tuple(run._replace(droppable_input=0) for run in runs))

    def at_pace(self, share: float) -> Profile:
        """The profile if each run takes this fraction of its time."""
        runs = [
            run._replace(
                nanoseconds=round(run.nanoseconds * share),
                backward_nanoseconds=round(run.backward_nanoseconds * share),
            )
            for run in self.runs
        ]
        return replace(self, runs=tuple(runs))

    def _highest_backward(self) -> int:
        """The peak of a backward with a retained graph, beyond what the runs hold."""
        highest, base = max(self.head_backward, self.tail), 0
        for run in self.runs:
            base += run.boundary
            if not run.fixed:
                highest = max(highest, base + max(cost.backward_peak for cost in run.menu))
        return highest


def costs_of(profile: Profile, choices: Sequence[Option]) -> list[OptionCost]:
    """The cost of each run under the option chosen for it.

    Without a link, runs whose bytes should move are recomputed. With a link, a run falls back to
    keep or recompute if it has nothing to move, or if it is the last run: its bytes could only
    leave after the forwards. An input does not move if the previous run holds it as its output.
    """
    if profile.link is None or _MOVING_OPTIONS.isdisjoint(choices):
        return [run.under(option) for run, option in zip(profile.runs, choices, strict=True)]
    allowed, last, costs = profile.link.options, len(profile.runs) - 1, list[OptionCost]()
    input_held = False
    for k, (run, option) in enumerate(zip(profile.runs, choices, strict=True)):
        cost = None
        if option is Option.SAVE_ON_HOST and option in allowed:
            cost = (run.saved_on_host() if k < last else None) or run.menu[0]
        elif option is Option.RECOMPUTE_FROM_HOST and option in allowed:
            cost = run.recomputed_from_host() if k < last and not input_held else None
        costs.append(cost or run.under(option))
        input_held = run.output_saved > 0 and not costs[k].option.recomputes
    return costs


_MOVING_OPTIONS = frozenset(option for option in Option if option.moves)


def transfers_of(profile: Profile, costs: Sequence[OptionCost]) -> Schedule:
    """When the bytes of these runs move, and how long the device waits for the transfers."""
    moved = [(k, cost.moved) for k, cost in enumerate(costs) if cost.moved]
    if not moved or profile.link is None:
        return NO_TRANSFERS
    backwards = [
        (run.backward_nanoseconds or run.nanoseconds) + cost.nanoseconds
        for run, cost in zip(profile.runs, costs, strict=True)
    ]
    return schedule(profile.link, moved, [run.nanoseconds for run in profile.runs], backwards)


def peak(profile: Profile, choices: Sequence[Option]) -> int:
    """The peak of a step with these choices, in bytes above its start."""
    return Moments(profile, costs_of(profile, choices)).peak


def levels(profile: Profile, choices: Sequence[Option]) -> Levels:
    """The memory between the phases of a step with these choices."""
    return Moments(profile, costs_of(profile, choices)).levels()


def extra_nanoseconds(profile: Profile, choices: Sequence[Option]) -> int:
    """The time that these choices add to the step: recomputes, and waiting for transfers."""
    costs = costs_of(profile, choices)
    return _extra(costs, transfers_of(profile, costs))


def _extra(costs: Sequence[OptionCost], schedule: Schedule) -> int:
    return sum([cost.nanoseconds for cost in costs]) + schedule.stall_nanoseconds


class Levels(NamedTuple):
    """Bytes above the step's start: at the start of each run's forward, after the last forward, and
    at the start of each run's backward."""

    forward: list[int]
    head: int
    backward: list[int]


class Moments:
    """The memory at every moment at which a step may peak, and its transfers."""

    def __init__(self, profile: Profile, costs: Sequence[OptionCost]) -> None:
        runs, count = profile.runs, len(profile.runs)
        self._profile = profile
        self.costs = costs
        self.schedule = transfers_of(profile, costs)
        self.bases: list[int] = []
        self.held: list[int] = []
        """Bytes that earlier runs hold in each run's forward."""
        released, fetched = [0] * (count + 1), [0] * (count + 1)
        for transfer in self.schedule.transfers:
            released[transfer.release_before] += costs[transfer.run].forward_freed
            fetched[transfer.prefetch_at] += costs[transfer.run].backward_freed
        base = held = 0
        for k, (run, cost) in enumerate(zip(runs, costs, strict=True)):
            base += run.boundary
            held -= released[k]
            self.bases.append(base)
            self.held.append(held)
            held += cost.forward_held
        self.forwards = [
            base + held + cost.forward_peak
            for base, held, cost in zip(self.bases, self.held, costs, strict=True)
        ]
        in_backward = sum([cost.backward_held for cost in costs]) - sum(fetched)
        self.held_in_head = held - released[count], in_backward
        """Bytes that all runs hold after the last forward, and before the first backward."""
        self.heads = (
            self.held_in_head[0] + profile.head_forward,
            in_backward + profile.head_backward,
        )
        self.backwards = self._backward_peaks(in_backward, fetched)
        self.peak = max(0, *self.forwards, *self.heads, *self.backwards, profile.tail)

    def _backward_peaks(self, held: int, fetched: Sequence[int]) -> list[int]:
        backwards = [0] * len(self.costs)
        for k in reversed(range(len(self.costs))):
            held += fetched[k] - self.costs[k].backward_held
            backwards[k] = self.bases[k] + held + self.costs[k].backward_peak
        return backwards

    @property
    def extra_nanoseconds(self) -> int:
        """The time that the plan adds to the step."""
        return _extra(self.costs, self.schedule)

    def levels(self) -> Levels:
        """The bytes in use between the phases of the step."""
        forward = [base + held for base, held in zip(self.bases, self.held, strict=True)]
        last = self.bases[-1] if self.bases else 0
        backward = [
            peak - cost.backward_peak + cost.backward_held + run.backward_entry
            for peak, cost, run in zip(self.backwards, self.costs, self._profile.runs, strict=True)
        ]
        return Levels(forward, last + self.held_in_head[0], backward)

    def rises(self, levels: Levels) -> Levels:
        """How high the memory rises above each of these levels before it reaches the next one."""
        profile, (starts, at_head, entries) = self._profile, levels
        if not profile.runs:
            return Levels([], max(self.heads), [])
        starts_of_next = [
            start + run.between_blocks_peak for start, run in zip(starts, profile.runs, strict=True)
        ]
        forward = [
            max(highest, after) - start
            for highest, after, start in zip(
                self.forwards, [*starts_of_next[1:], at_head], starts, strict=True
            )
        ]
        backwards = [max(self.backwards[0], profile.tail), *self.backwards[1:]]
        backward = [highest - entry for highest, entry in zip(backwards, entries, strict=True)]
        return Levels(forward, max(self.heads) - at_head, backward)
