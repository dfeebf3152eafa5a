"""What one run of a block costs, under each of its options.

The costs of an option follow from what was measured of its run:

    keep       forward_peak   max(recompute_peak, between_blocks_peak)
               backward_peak  backward_entry − droppable_input + saved + backward_peak
               held           saved − output_saved − droppable_input,
                              in the forwards less shared_casts
    recompute  forward_peak   max(forward_peak, between_blocks_peak)
               backward_peak  backward_entry + max(recompute_peak, saved + backward_peak)
               held           0

    save on host         as keep; saved − output_saved bytes move, and while they are away it
                         holds nothing, not even what it drops of its input
    recompute from host  as recompute; its boundary moves, and while it is away the base of all
                         later runs is lower by so much

A run that saves its own output (a final ReLU) shares these bytes with the input of the next run,
hence `output_saved`. A run that does not save its input (its first operator casts it, say) frees it
when it is kept, while a recompute needs it, hence `droppable_input`. Under autocast the casts of
its weights stay cached until the forwards are over, whether it is kept or not, hence
`shared_casts`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

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
    moved: int = 0
    """Bytes that wait in host memory between its release point and its prefetch point."""
    forward_freed: int = 0
    """How much less is in use in the forwards after its release point."""
    backward_freed: int = 0
    """How much less is in use in the backwards before its prefetch point."""


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
    input_movable: bool = False
    """Whether dropping its input after its forward frees it: no other object holds it."""
    backward_nanoseconds: int = 0
    """Time of its backward, without a recompute; 0 if unknown."""

    @property
    def held(self) -> int:
        """What it holds in the backward if it is kept."""
        return max(0, self.saved - self.output_saved - self.droppable_input)

    @property
    def menu(self) -> tuple[OptionCost, ...]:
        """What it costs under each option that it has, the one that holds the most first."""
        return _menu_of(self)

    def saved_on_host(self) -> OptionCost | None:
        """Its cost if its activations wait in host memory; None if they cannot, or are none."""
        keep, moved = self.menu[0], self.saved - self.output_saved
        if self.fixed or moved <= 0:
            return None
        return keep._replace(
            option=Option.SAVE_ON_HOST,
            moved=moved,
            forward_freed=max(0, moved - self.shared_casts),
            backward_freed=moved,
        )

    def recomputed_from_host(self) -> OptionCost | None:
        """Its cost if it is recomputed and its input waits in host memory; None if it cannot."""
        if self.fixed or not self.input_movable or self.boundary <= 0:
            return None
        return self.menu[-1]._replace(
            option=Option.RECOMPUTE_FROM_HOST,
            moved=self.boundary,
            forward_freed=self.boundary,
            backward_freed=self.boundary,
        )

    def under(self, option: Option) -> OptionCost:
        """Its cost under this option; under its strictest, if it does not have this one.

        Without a link to the host, it has no option that moves bytes.
        """
        menu = _menu_of(self)
        for cost in menu:
            if cost.option is option:
                return cost
        return menu[-1]


@lru_cache(maxsize=1024)
def _menu_of(run: RunCost) -> tuple[OptionCost, ...]:
    """The menu of a run, made once: a planner and the peak of its plan ask for the same."""
    _, forward, entry, saved, spike, back, own, droppable, between, casts, took, fixed, *_ = run
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
