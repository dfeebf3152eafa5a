"""What is measured of one run of a block while its step is observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mimose.costs import Run, RunCost
from mimose.execution import ForwardEnd
from mimose.training.boundary_tensors import BoundaryTensors, bytes_of_storages


@dataclass(slots=True)
class RunBackward:
    """Measurements of one run's backward."""

    awaited: bool = False
    """Whether a backward is expected: the output depends on something that is trained."""
    entered: bool = False
    """Whether the backward has reached the run."""
    late: bool = False
    """Whether that was in a later backward, after the step's own."""
    entry: int = 0
    """The level at that moment: bytes above the step's start, less what other runs keep."""
    peak: int = 0
    """The peak above `active_in_use`."""
    active_in_use: int = 0
    """In use when the activations are there, kept or rebuilt."""
    gradients: int = 0
    """Bytes of gradients that were allocated before it."""
    begun: Any = None
    """When it began; after the recompute, if there was one."""
    ended: Any = None


@dataclass(slots=True)
class RunObservation:
    """Measurements of one run. Levels are bytes above the step's start, less what other runs
    keep; `…_in_use` are readings."""

    run: Run
    start: int
    start_in_use: int
    tensors: BoundaryTensors
    kept: bool
    """Whether its activations are kept, and not evicted."""
    between: int = 0
    """Peak between the end of the previous run and the start of this one."""
    casts: int = 0
    """Casts of its weights, which stay until the forwards are over, kept or not."""
    forward: int = 0
    """Peak of its forward."""
    was_kept: bool = False
    """Whether its forward kept its activations."""
    held: int = 0
    """Bytes that it holds beyond its outputs, if it is kept."""
    input_leaves: bool = False
    """Whether its input is being copied to the host and is still on the device."""
    fixed: bool = True
    """Whether it ran without a frame, because it cannot be recomputed."""
    saved: int = 0
    spike: int = 0
    begun: Any = None
    ended: Any = None
    backward: RunBackward = field(default_factory=RunBackward)

    @property
    def unused(self) -> bool:
        """Whether the loss does not depend on it."""
        return self.backward.awaited and not self.backward.entered

    def forward_ends(self, end: ForwardEnd, in_use: int, peak: int) -> None:
        """Record the end of its forward."""
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
        """Bytes of outputs that the model has dropped and this run still holds."""
        living = self.tensors.output_saved + self.tensors.waiting_bytes
        return max(0, self.saved - self.held - living)

    def cost(self, start_before: int, nanoseconds: int, backward_nanoseconds: int) -> RunCost:
        """The costs of the run; `start_before` is the level at which the previous run started."""
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
