"""The memory of a step, moment by moment: plain arithmetic on a profile.

A profile holds what each run of a block costs at one input size. A plan chooses one option for each
run, and `run_cost.py` has the costs of that option. Bytes count from the memory in use when the
first block starts. Two levels carry through the step: `base`, the inputs of all runs up to this one
(boundaries), and `held`, what the options of earlier runs hold beyond that, in the forwards and in
the backwards. The peak is the largest of

    forward of run k      base[k] + held in forward + forward_peak      for k = 0, 1, …
    after the forwards    held in forward + head_forward
                          held in backward + head_backward
    backward of run k     base[k] + held in backward + backward_peak    for k = …, 1, 0
    after the backwards   tail

With a link to the host, what a run holds, or its boundary, may leave the device and come back: it
counts until its release point in the forwards, and again from its prefetch point in the backwards.
Both points, and how long the device waits for transfers, follow from the times of all runs and the
speed of the link (`transfers.py`).

Some things depend on the step rather than on the size (`StepConditions`): gradients that are
allocated in it, and outputs of the previous step that are alive in the forward and gone in the
backward. And a backward that keeps its graph (`retain_graph=True`) frees nothing that a run has
kept: then everything held stays until the end, and a second backward finds all gradients.
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
    """What a step's memory depends on besides its size."""

    gradients_allocated: tuple[int, ...] = ()
    """Bytes of gradients that the step has allocated before each run's backward."""
    all_gradients_allocated: int = 0
    """The same by the end of the backward."""
    previous_output_bytes: int = 0
    """Outputs of the previous step: alive in the forward, gone in the backward."""
    retained: bool = False
    """Whether the backward keeps the graph for another one."""
    beside_bytes: int = 0
    """By how much steps of other handles rise while everything that is kept is there."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What every run of a step costs at one input size."""

    size: InputSize
    runs: tuple[RunCost, ...]
    head_forward: int
    """Peak after the last run's forward and before the model's return."""
    head_backward: int
    """Peak from there to the first backward of a run."""
    tail: int = 0
    """Peak after the first run's backward (embeddings), without the gradients that were allocated
    before that. Nothing of the blocks is left by then."""
    prelude: int | None = 0
    """What the model holds at the step's start, beyond what was in use before: embeddings. None if
    it was not measured."""
    link: Link | None = None
    """The link to host memory; None if plans do not use the host."""

    @property
    def head(self) -> int:
        return max(self.head_forward, self.head_backward)

    def in_step(self, conditions: StepConditions) -> Profile:
        """The same under these conditions."""
        allocated, by_end, previous, retained, beside = conditions
        if not (previous or by_end or any(allocated) or retained or beside):
            return self
        allocated = allocated or (0,) * len(self.runs)
        runs = tuple(
            [
                RunCost._make((boundary, forward, entry + more - previous, *others))
                for (boundary, forward, entry, *others), more in zip(
                    self.runs, allocated, strict=True
                )
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
        """The same if kept runs hold all their arguments, as they do while they can be evicted."""
        runs = self.runs
        if not any(run.droppable_input for run in runs):
            return self
        return replace(self, runs=tuple(run._replace(droppable_input=0) for run in runs))

    def at_pace(self, share: float) -> Profile:
        """The same if every run takes this share of its time."""
        runs = [
            run._replace(
                nanoseconds=round(run.nanoseconds * share),
                backward_nanoseconds=round(run.backward_nanoseconds * share),
            )
            for run in self.runs
        ]
        return replace(self, runs=tuple(runs))

    def _highest_backward(self) -> int:
        """The highest moment of the backward where everything held stays to the end."""
        highest, base = max(self.head_backward, self.tail), 0
        for run in self.runs:
            base += run.boundary
            if not run.fixed:
                highest = max(highest, base + max(cost.backward_peak for cost in run.menu))
        return highest


def costs_of(profile: Profile, choices: Sequence[Option]) -> list[OptionCost]:
    """The cost of each run under the option chosen for it.

    Without a link, runs whose bytes were to move are recomputed. With one, a run that has nothing
    to move is kept or recomputed, as it was to be; so is the last run, whose bytes could only leave
    when the forwards are over. An input stays where the run before holds it as its own output.
    """
    if profile.link is None or _MOVING.isdisjoint(choices):
        return [run.under(option) for run, option in zip(profile.runs, choices, strict=True)]
    allowed, last, costs = profile.link.options, len(profile.runs) - 1, list[OptionCost]()
    output_held = False
    for k, (run, option) in enumerate(zip(profile.runs, choices, strict=True)):
        cost = None
        if option is Option.SAVE_ON_HOST and option in allowed:
            cost = (run.saved_on_host() if k < last else None) or run.menu[0]
        elif option is Option.RECOMPUTE_FROM_HOST and option in allowed:
            cost = run.recomputed_from_host() if k < last and not output_held else None
        costs.append(cost or run.under(option))
        output_held = run.output_saved > 0 and not costs[k].option.recomputes
    return costs


_MOVING = frozenset(option for option in Option if option.moves)


def transfers_of(profile: Profile, costs: Sequence[OptionCost]) -> Schedule:
    """When the bytes of these runs move, and how long the device waits for them."""
    moved = [(k, cost.moved) for k, cost in enumerate(costs) if cost.moved]
    if not moved or profile.link is None:
        return NO_TRANSFERS
    backwards = [
        (run.backward_nanoseconds or run.nanoseconds) + cost.nanoseconds
        for run, cost in zip(profile.runs, costs, strict=True)
    ]
    return schedule(profile.link, moved, [run.nanoseconds for run in profile.runs], backwards)


def peak(profile: Profile, choices: Sequence[Option]) -> int:
    """The peak of a step above its start, if each run does what is chosen for it."""
    return Moments(profile, costs_of(profile, choices)).peak


def levels(profile: Profile, choices: Sequence[Option]) -> tuple[list[int], int, list[int]]:
    """The bytes in use above the step's start: when each run's forward starts, after the last
    forward, and when the backward comes to each run."""
    moments = Moments(profile, costs_of(profile, choices))
    forward = [base + held for base, held in zip(moments.bases, moments.held, strict=True)]
    last = sum(run.boundary for run in profile.runs)
    backward = [
        peak - cost.backward_peak + cost.backward_held + run.backward_entry
        for peak, cost, run in zip(moments.backwards, moments.costs, profile.runs, strict=True)
    ]
    return forward, last + moments.held_in_head[0], backward


def rises(profile: Profile, choices: Sequence[Option]) -> tuple[list[int], int, list[int]]:
    """How far memory rises above each of these levels until it comes to the next one."""
    moments = Moments(profile, costs_of(profile, choices))
    starts, at_head, entries = levels(profile, choices)
    if not profile.runs:
        return [], max(moments.heads), []
    between = [
        start + run.between_blocks_peak for start, run in zip(starts, profile.runs, strict=True)
    ]
    forward = [
        max(highest, after) - start
        for highest, after, start in zip(
            moments.forwards, [*between[1:], at_head], starts, strict=True
        )
    ]
    backwards = [max(moments.backwards[0], profile.tail), *moments.backwards[1:]]
    backward = [highest - entry for highest, entry in zip(backwards, entries, strict=True)]
    return forward, max(moments.heads) - at_head, backward


def extra_nanoseconds(profile: Profile, choices: Sequence[Option]) -> int:
    """The time that a plan adds to the step: recomputes, and waiting for transfers."""
    costs = costs_of(profile, choices)
    return _extra(costs, transfers_of(profile, costs))


def _extra(costs: Sequence[OptionCost], schedule: Schedule) -> int:
    return sum([cost.nanoseconds for cost in costs]) + schedule.stall_nanoseconds


class Moments:
    """Every moment of a step at which it may peak, and the transfers between them."""

    def __init__(self, profile: Profile, costs: Sequence[OptionCost]) -> None:
        runs, count = profile.runs, len(profile.runs)
        self.costs = costs
        self.schedule = transfers_of(profile, costs)
        self.bases: list[int] = []
        self.held: list[int] = []
        """What earlier runs hold in each run's forward."""
        leaves, comes = [0] * (count + 1), [0] * (count + 1)
        for run, _, release, prefetch in self.schedule.transfers:
            leaves[release] += costs[run].forward_freed
            comes[prefetch] += costs[run].backward_freed
        base = held = 0
        for k, (each, cost) in enumerate(zip(runs, costs, strict=True)):
            base += each.boundary
            held -= leaves[k]
            self.bases.append(base)
            self.held.append(held)
            held += cost.forward_held
        self.forwards = [
            base + held + cost.forward_peak
            for base, held, cost in zip(self.bases, self.held, costs, strict=True)
        ]
        in_backward = sum([cost.backward_held for cost in costs]) - sum(comes)
        self.held_in_head = held - leaves[count], in_backward
        """What all runs hold after the last forward, and before the first backward."""
        self.heads = (
            self.held_in_head[0] + profile.head_forward,
            in_backward + profile.head_backward,
        )
        self.backwards = self._backwards(in_backward, comes)
        self.peak = max(0, *self.forwards, *self.heads, *self.backwards, profile.tail)

    def _backwards(self, held: int, comes: Sequence[int]) -> list[int]:
        """The peak of each run's backward."""
        backwards = [0] * len(self.costs)
        for k in reversed(range(len(self.costs))):
            held += comes[k] - self.costs[k].backward_held
            backwards[k] = self.bases[k] + held + self.costs[k].backward_peak
        return backwards

    @property
    def extra_nanoseconds(self) -> int:
        """The time that the plan adds to the step."""
        return _extra(self.costs, self.schedule)
