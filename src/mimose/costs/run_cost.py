"""The cost of one run of a block under each option.

`RunCost` has the measured (or predicted) quantities; the costs of the options follow from them:

    keep       forward_peak   max(recompute_peak, between_blocks_peak)
               backward_peak  backward_entry − droppable_input + saved + backward_peak
               held           saved − output_saved − droppable_input,
                              during the forwards also − shared_casts
    recompute  forward_peak   max(forward_peak, between_blocks_peak)
               backward_peak  backward_entry + max(recompute_peak, saved + backward_peak)
               held           0

    save on host         as keep; saved − output_saved bytes move. While they are on the host, this
                         many bytes less are in use: the run holds −droppable_input
    recompute from host  as recompute; its boundary moves. While it is on the host, the base of all
                         later runs is lower by as many bytes

Three quantities are subtracted:

- `output_saved`: a run that saves its own output (a final ReLU) shares these bytes with the input
  of the next run.
- `droppable_input`: a run that does not save its input (its first operator casts it, say) frees it
  when the run is kept. A recompute needs it.
- `shared_casts`: under autocast, casts of weights stay cached until the forwards are over, whether
  the run is kept or not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mimose.costs.options import Option


class OptionCost(NamedTuple):
    """The cost of a run under one option: bytes above its base and above what earlier runs hold."""

    option: Option
    forward_peak: int
    """Peak between the end of the previous run's forward and the end of its own."""
    backward_peak: int
    """Peak in its backward, including what it holds itself."""
    forward_held: int = 0
    """Held after its forward, while later forwards run."""
    backward_held: int = 0
    """Held while the backwards of later runs run."""
    nanoseconds: int = 0
    """Time that it adds to the step."""
    moved: int = 0
    """Bytes that are in host memory between its release point and its prefetch point."""
    forward_freed: int = 0
    """Bytes that its release frees on the device, as counted in the forwards."""
    backward_freed: int = 0
    """The same as counted in the backwards, until its prefetch point."""


class RunCost(NamedTuple):
    """The measured or predicted quantities of one run of a block, in bytes and nanoseconds.

    All bytes are increments rather than levels: an option that frees a boundary lowers all later
    levels.
    """

    boundary: int
    """In use when its forward starts, above the start of the previous run: usually its input."""
    forward_peak: int
    """Peak of a forward that saves nothing (to be recomputed later), above its start."""
    backward_entry: int
    """In use when its backward begins, without what it saved, above the start of its forward."""
    saved: int
    """The activations that it saves if kept."""
    recompute_peak: int
    """Peak of its recompute above what was in use before; also of its forward if it is kept."""
    backward_peak: int
    """Peak of its backward above what is in use when its activations exist."""
    output_saved: int
    """Bytes of its own output among `saved`; the output lives until the backward anyway."""
    droppable_input: int
    """Bytes of its input that it does not save. Only a recompute needs them."""
    between_blocks_peak: int = 0
    """Peak between the end of the previous run and its own start, above its own start."""
    shared_casts: int = 0
    """Bytes of `saved` that are autocast's casts of weights, cached until the forwards are over."""
    nanoseconds: int = 0
    """Time of its recompute."""
    fixed: bool = False
    """Whether it cannot be recomputed, or has nothing to recompute."""
    input_movable: bool = False
    """Whether dropping its input after the forward frees memory: no other object holds it."""
    backward_nanoseconds: int = 0
    """Time of its backward, without a recompute; 0 if unknown."""

    @property
    def held(self) -> int:
        """Bytes that it holds until its backward if it is kept."""
        return max(0, self.saved - self.output_saved - self.droppable_input)

    @property
    def menu(self) -> tuple[OptionCost, ...]:
        """Its cost under each option without a link to the host: keep first, then recompute."""
        return _menu_of(self)

    def saved_on_host(self) -> OptionCost | None:
        """Its cost if its activations move to host memory; None if it has none that can."""
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
        """Its cost if it is recomputed and its input moves to host memory; None if it cannot."""
        if self.fixed or not self.input_movable or self.boundary <= 0:
            return None
        return self.menu[-1]._replace(
            option=Option.RECOMPUTE_FROM_HOST,
            moved=self.boundary,
            forward_freed=self.boundary,
            backward_freed=self.boundary,
        )

    def under(self, option: Option) -> OptionCost:
        """Its cost under this option if `menu` has it, else under the last option of `menu`."""
        menu = _menu_of(self)
        for cost in menu:
            if cost.option is option:
                return cost
        return menu[-1]


@lru_cache(maxsize=1024)
def _menu_of(run: RunCost) -> tuple[OptionCost, ...]:
    """The menu of a run; cached, because planners and timelines ask for it again and again."""
    recomputed_forward_peak = max(run.forward_peak, run.between_blocks_peak)
    if run.fixed:  # its backward is never measured separately
        return (OptionCost(Option.KEEP, recomputed_forward_peak, recomputed_forward_peak),)
    with_saved = run.saved + run.backward_peak
    return (
        OptionCost(
            Option.KEEP,
            forward_peak=max(run.recompute_peak, run.between_blocks_peak),
            backward_peak=run.backward_entry - run.droppable_input + with_saved,
            forward_held=max(0, run.held - run.shared_casts),
            backward_held=run.held,
        ),
        OptionCost(
            Option.RECOMPUTE,
            forward_peak=recomputed_forward_peak,
            backward_peak=run.backward_entry + max(run.recompute_peak, with_saved),
            nanoseconds=run.nanoseconds,
        ),
    )


SUBTRACTED = ("output_saved", "droppable_input", "shared_casts")
"""Quantities that are subtracted: where they are uncertain, the lower value is the safe one."""
