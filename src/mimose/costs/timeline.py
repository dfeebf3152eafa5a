"""The memory of a step, moment by moment: plain arithmetic on a profile.

A profile holds what each run of a block costs at one input size. A plan chooses one option for each
run. Bytes count from the memory in use when the first block starts. Two levels carry through the
step: `base`, the inputs of all runs up to this one (boundaries), and `held`, what the options of
earlier runs hold beyond that, in the forwards and in the backwards. The peak is the largest of

    forward of run k      base[k] + held in forward + forward_peak      for k = 0, 1, …
    after the forwards    held in forward + head_forward
                          held in backward + head_backward
    backward of run k     base[k] + held in backward + backward_peak    for k = …, 1, 0
    after the backwards   tail

The costs of an option follow from what was measured of its run:

    keep       forward_peak   max(recompute_peak, between_blocks_peak)
               backward_peak  backward_entry − droppable_input + saved + backward_peak
               held           saved − output_saved − droppable_input,
                              in the forwards less shared_casts
    recompute  forward_peak   max(forward_peak, between_blocks_peak)
               backward_peak  backward_entry + max(recompute_peak, saved + backward_peak)
               held           0

A run that saves its own output (a final ReLU) shares these bytes with the input of the next run,
hence `output_saved`. A run that does not save its input (its first operator casts it, say) frees it
when it is kept, while a recompute needs it, hence `droppable_input`. Under autocast the casts of
its weights stay cached until the forwards are over, whether it is kept or not, hence
`shared_casts`.

What an option holds may leave the device and come back: it counts until its release point in the
forwards, and again from its prefetch point in the backwards.

Some things depend on the step rather than on the size (`StepConditions`): gradients that are
allocated in it, and outputs of the previous step that are alive in the forward and gone in the
backward. And a backward that keeps its graph (`retain_graph=True`) frees nothing that a run has
kept: then everything held stays until the end, and a second backward finds all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mimose.costs.input_size import InputSize
from mimose.costs.options import Option


class OptionCost(NamedTuple):
    """What a run costs under one option: bytes above its base and what earlier runs hold."""

    option: Option
    forward_peak: int
    """From the end of the run before to the end of its own forward."""
    backward_peak: int
    """In its backward, what it holds itself included."""
    forward_held: int = 0
    """Held from its forward on while forwards run."""
    backward_held: int = 0
    """Held in the backwards, until its own."""
    nanoseconds: int = 0
    """Time that it adds to the step."""
    release_after: int | None = None
    """How many forwards of following runs pass before its bytes leave the device; None if they
    stay."""
    prefetch_before: int = 0
    """How many backwards of following runs pass while its bytes are back on the device."""
    moved: int = 0
    """Bytes that it moves off the device, and back again."""


class RunCost(NamedTuple):
    """What was measured, or is predicted, of one run of a block: bytes, and nanoseconds.

    All bytes are increments, so that an option which frees a boundary can be expressed.
    """

    boundary: int
    """What is in use when its forward starts, above the start of the run before: its input."""
    forward_peak: int
    """Peak of its forward above its start, if it is recomputed later and saves nothing."""
    backward_entry: int
    """In use when its backward begins, above its forward's start; nothing of it saved."""
    saved: int
    """The activations that it saves."""
    recompute_peak: int
    """Peak of its recompute above what was in use before; also that of its forward if kept."""
    backward_peak: int
    """Peak of its backward above what is in use once its activations are there."""
    output_saved: int
    """Bytes of its own output that it saves, and that live until the backward anyway."""
    droppable_input: int
    """Bytes of its input that it does not save, and that only a recompute holds on to."""
    between_blocks_peak: int = 0
    """Peak between the end of the run before and its own start, above that start."""
    shared_casts: int = 0
    """What it saves and what stays until the forwards are over anyway: casts of its weights."""
    nanoseconds: int = 0
    """Time of its recompute."""
    fixed: bool = False
    """Whether it cannot be recomputed, or has nothing to recompute."""

    @property
    def held(self) -> int:
        """What it holds in the backward if it is kept."""
        return max(0, self.saved - self.output_saved - self.droppable_input)

    @property
    def menu(self) -> tuple[OptionCost, ...]:
        """What it costs under each option that it has, the one that holds the most first."""
        return _menu_of(self)

    def under(self, option: Option) -> OptionCost:
        """Its cost under this option; under its strictest, if it does not have this one."""
        menu = _menu_of(self)
        for cost in menu:
            if cost.option is option:
                return cost
        return menu[-1]


@lru_cache(maxsize=1024)
def _menu_of(run: RunCost) -> tuple[OptionCost, ...]:
    """The menu of a run, made once: a planner and the peak of its plan ask for the same."""
    _, forward, entry, saved, spike, back, own, droppable, between, casts, took, fixed = run
    recomputed = forward if forward > between else between
    if fixed:  # its backward was never measured apart from others
        return (OptionCost(Option.KEEP, recomputed, recomputed),)
    kept, above = max(0, saved - own - droppable), saved + back
    return (
        OptionCost(
            Option.KEEP,
            spike if spike > between else between,
            entry - droppable + above,
            max(0, kept - casts),
            kept,
        ),
        OptionCost(
            Option.RECOMPUTE,
            recomputed,
            entry + (spike if spike > above else above),
            nanoseconds=took,
        ),
    )


SUBTRACTED = ("output_saved", "droppable_input", "shared_casts")
"""Quantities of a run that are subtracted: where they are uncertain, the lower end is safe."""


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
        return Profile(self.size, runs, max(self.head_forward, beside), head, tail, self.prelude)

    def holding_arguments(self) -> Profile:
        """The same if kept runs hold all their arguments, as they do while they can be evicted."""
        runs = self.runs
        if not any(run.droppable_input for run in runs):
            return self
        return replace(self, runs=tuple(run._replace(droppable_input=0) for run in runs))

    def _highest_backward(self) -> int:
        """The highest moment of the backward where everything held stays to the end."""
        highest, base = max(self.head_backward, self.tail), 0
        for run in self.runs:
            base += run.boundary
            if not run.fixed:
                highest = max(highest, base + max(cost.backward_peak for cost in run.menu))
        return highest


def costs_of(profile: Profile, choices: Sequence[Option]) -> list[OptionCost]:
    """The cost of each run under the option chosen for it."""
    return [run.under(option) for run, option in zip(profile.runs, choices, strict=True)]


def peak(profile: Profile, choices: Sequence[Option]) -> int:
    """The peak of a step above its start, if each run does what is chosen for it."""
    moments = _Moments(profile, choices)
    return max(0, *moments.forwards, moments.head, *moments.backwards, profile.tail)


def levels(profile: Profile, choices: Sequence[Option]) -> tuple[list[int], int, list[int]]:
    """The bytes in use above the step's start: when each run's forward starts, after the last
    forward, and when the backward comes to each run."""
    moments = _Moments(profile, choices)
    forward = [base + held for base, held in zip(moments.bases, moments.held, strict=True)]
    last = sum(run.boundary for run in profile.runs)
    backward = [
        peak - cost.backward_peak + cost.backward_held + run.backward_entry
        for peak, cost, run in zip(moments.backwards, moments.costs, profile.runs, strict=True)
    ]
    return forward, last + moments.held_in_head, backward


def peaks_to_come(profile: Profile, choices: Sequence[Option]) -> tuple[list[int], int, list[int]]:
    """The highest of all moments still to come: from each run's forward on, from the head on, and
    from each run's backward on."""
    moments = _Moments(profile, choices)
    highest = profile.tail
    backward = [highest := max(highest, moment) for moment in moments.backwards]
    highest = head = max(highest, moments.head)
    forward = [highest := max(highest, moment) for moment in reversed(moments.forwards)]
    return forward[::-1], head, backward


def extra_nanoseconds(profile: Profile, choices: Sequence[Option]) -> int:
    """The time that a plan adds to the step."""
    return sum(cost.nanoseconds for cost in costs_of(profile, choices))


class _Moments:
    """Every moment of a step at which it may peak."""

    def __init__(self, profile: Profile, choices: Sequence[Option]) -> None:
        runs, count = profile.runs, len(profile.runs)
        self.costs = costs = costs_of(profile, choices)
        self.bases: list[int] = []
        self.held: list[int] = []
        """What earlier runs hold in each run's forward."""
        base = held = 0
        leaves = [0] * (count + 1)
        for k, (run, cost) in enumerate(zip(runs, costs, strict=True)):
            base += run.boundary
            held -= leaves[k]
            self.bases.append(base)
            self.held.append(held)
            held += cost.forward_held
            if _leaves_in_forward(k, cost, count):
                leaves[k + 1 + (cost.release_after or 0)] += cost.forward_held
        self.held_in_head = held - leaves[count]
        self.forwards = [
            base + held + cost.forward_peak
            for base, held, cost in zip(self.bases, self.held, costs, strict=True)
        ]
        self.backwards, in_head = self._backwards(count)
        forward, backward = profile.head_forward, profile.head_backward
        self.head = max(self.held_in_head + forward, in_head + backward)

    def _backwards(self, count: int) -> tuple[list[int], int]:
        """The peak of each run's backward; and what is held when the first of them begins."""
        comes, held = [0] * (count + 1), 0
        for k, cost in enumerate(self.costs):
            away = _leaves_in_forward(k, cost, count) and k + cost.prefetch_before < count
            comes[k + cost.prefetch_before if away else count] += cost.backward_held
        held = in_head = comes[count]
        backwards = [0] * count
        for k in reversed(range(count)):
            held += comes[k] - self.costs[k].backward_held
            backwards[k] = self.bases[k] + held + self.costs[k].backward_peak
        return backwards, in_head


def _leaves_in_forward(k: int, cost: OptionCost, count: int) -> bool:
    """Whether the bytes of run k leave the device before the forwards are over."""
    return cost.release_after is not None and k + 1 + cost.release_after <= count
