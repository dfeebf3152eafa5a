"""What is measured of one run of a block while its step is observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mimose.costs import Run, RunCost
from mimose.execution import ForwardEnd
from mimose.training.boundary_tensors import BoundaryTensors, bytes_of_storages


@dataclass(slots=True)
class RunBackward:
    """What is known so far of one run's backward."""

    awaited: bool = False
    """Whether it is to come: the run's output depends on something that is trained."""
    entered: bool = False
    """Whether it came."""
    late: bool = False
    """Whether it came in another backward, after the step's."""
    entry: int = 0
    """The level when it came; bytes above the step's start, with nothing of other runs kept."""
    peak: int = 0
    """Its peak above `active_in_use`."""
    active_in_use: int = 0
    """The reading once the run's activations are there for it."""
    gradients: int = 0
    """Gradients that were allocated before it."""
    begun: Any = None
    """When it began, after a recompute."""
    ended: Any = None


@dataclass(slots=True)
class RunObservation:
    """What is known so far of one run. Levels are bytes above the step's start, with nothing of
    other runs kept; `…_in_use` are readings."""

    run: Run
    start: int
    start_in_use: int
    tensors: BoundaryTensors
    kept: bool
    """Whether its activations are there: kept, and not evicted."""
    between: int = 0
    """Peak since the end of the run before."""
    casts: int = 0
    """What it leaves behind until the forwards are over, kept or not: casts of its weights."""
    forward: int = 0
    """Peak of its forward."""
    was_kept: bool = False
    """Whether its forward kept its activations."""
    held: int = 0
    """What it holds beyond its outputs, if it is kept."""
    input_leaves: bool = False
    """Whether its input is on its way to the host, and has not left the device."""
    fixed: bool = True
    """Whether it ran without a frame: it cannot be recomputed."""
    saved: int = 0
    spike: int = 0
    begun: Any = None
    ended: Any = None
    backward: RunBackward = field(default_factory=RunBackward)

    @property
    def unused(self) -> bool:
        """Whether the loss did not depend on it."""
        return self.backward.awaited and not self.backward.entered

    def forward_ends(self, end: ForwardEnd, in_use: int, peak: int) -> None:
        """Its forward is over, with this reading."""
        self.fixed = False
        self.forward = peak - self.start_in_use
        self.tensors.forward_ends(end)
        self.was_kept = end.kept
        if self.kept:
            # What hooks did not see (tensors on a custom Function's ctx, copies of buffers) stays
            # if the run is recomputed, too. What they saw may have been there before.
            taken = max(0, in_use - self.start_in_use - self.tensors.output_bytes)
            self.held = min(taken, end.saved_inside)
            self.saved = self.held + bytes_of_storages(end.saved_outputs)
            self.spike = self.forward

    @property
    def dropped_output_bytes(self) -> int:
        """What it holds of outputs that the model has dropped."""
        living = self.tensors.output_saved + self.tensors.waiting_bytes
        return max(0, self.saved - self.held - living)

    def cost(self, start_before: int, nanoseconds: int, backward_nanoseconds: int) -> RunCost:
        """What counts of it; `start_before` is where the run before started."""
        saved, output_saved = max(0, self.saved), self.tensors.output_saved
        boundary = self.start - start_before
        return RunCost(
            boundary=boundary,
            forward_peak=max(0, self.forward),
            backward_entry=0 if self.fixed else self.backward.entry - self.start,
            saved=saved,
            recompute_peak=max(0, self.spike),
            backward_peak=max(0, self.backward.peak),
            output_saved=min(output_saved, saved),
            droppable_input=self.tensors.droppable_input,
            between_blocks_peak=self.between - self.start,
            shared_casts=min(self.casts, max(0, self.saved - output_saved)),
            nanoseconds=nanoseconds,
            fixed=self.fixed,
            input_movable=0 < boundary <= self.tensors.movable_input,
            backward_nanoseconds=backward_nanoseconds,
        )
