"""What is measured of one run of a block while its step is observed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mimose.costs import Run, RunCost
from mimose.execution import ForwardEnd
from mimose.tensors import allocated_bytes, storage_bytes, storage_of, storages_in


@dataclass(slots=True)
class RunObservation:
    """What is known so far of one run. Levels are bytes above the step's start, with nothing of
    other runs kept; `…_in_use` are readings."""

    run: Run
    start: int
    start_in_use: int
    between: int = 0
    """Peak since the end of the run before."""
    forward: int = 0
    """Peak of its forward."""
    kept: bool = False
    """Whether its activations are there: kept, and not evicted."""
    was_kept: bool = False
    """Whether its forward kept them."""
    held: int = 0
    """What it holds beyond its outputs, if it is kept."""
    fixed: bool = True
    """Whether it ran without a frame: it cannot be recomputed."""
    saved: int = 0
    spike: int = 0
    back: int = 0
    entry: int = 0
    gradients: int = 0
    """Gradients that were allocated before its backward."""
    active_in_use: int = 0
    """In use once its activations are there for the backward."""
    casts: int = 0
    """What it leaves behind until the forwards are over, kept or not: casts of its weights."""
    output_bytes: int = 0
    output_saved: int = 0
    droppable_input: int = 0
    saved_outputs: list[SavedOutput] = field(default_factory=list)
    """Outputs that it saves, and that no run has been given yet."""
    shared_inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Inputs that the run before saves: where that is kept, they outlive this one's backward."""
    unsaved_inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Its inputs that depend on something trained, if it is recomputed."""
    movable_input: int = 0
    """Bytes of its input that come free if its recompute does not hold on to them."""
    begun: Any = None
    ended: Any = None
    backward_begun: Any = None
    """When its backward began, after a recompute."""
    backward_ended: Any = None
    awaited: bool = False
    """Whether its output depends on something that is trained."""
    entered: bool = False
    """Whether the backward came to it."""
    late: bool = False
    """Whether it came in another backward, after the step's."""

    @property
    def unused(self) -> bool:
        """Whether the loss did not depend on it."""
        return self.awaited and not self.entered

    def forward_ends(self, end: ForwardEnd, in_use: int, peak: int) -> None:
        """Its forward is over, with this reading."""
        self.fixed = False
        self.forward = peak - self.start_in_use
        self.saved_outputs = [SavedOutput(tensor) for tensor in end.saved_outputs]
        self.unsaved_inputs = [
            weakref.ref(tensor) for tensor in end.unsaved_inputs if tensor.grad_fn is not None
        ]
        self.output_bytes = bytes_of_storages(end.outputs)
        self.was_kept = end.kept
        if not end.kept:
            self.inputs = [weakref.ref(t) for t in end.inputs if t.grad_fn is not None]
        if self.kept:
            # What hooks did not see (tensors on a custom Function's ctx, copies of buffers) stays
            # if the run is recomputed, too. What they saw may have been there before.
            taken = max(0, in_use - self.start_in_use - self.output_bytes)
            self.held = min(taken, end.saved_inside)
            self.saved = self.held + bytes_of_storages(end.saved_outputs)
            self.spike = self.forward

    def pass_outputs_on(self, args: Any, kwargs: Any) -> list[weakref.ref[torch.Tensor]]:
        """The next run is given some of its outputs: those that it saves live on anyway.

        Those that the model has dropped (attention weights that nothing reads) live on only while
        this run is kept.
        """
        given = storages_in((args, kwargs))
        passed = [output for output in self.saved_outputs if output.key in given]
        self.output_saved += sum(output.bytes for output in passed)
        self.saved_outputs = [output for output in self.saved_outputs if output.key not in given]
        return [output.tensor for output in passed]

    @property
    def dropped_output_bytes(self) -> int:
        """What it holds of outputs that the model has dropped."""
        return max(0, self.saved - self.held - self.output_saved - self._waiting_bytes)

    @property
    def _waiting_bytes(self) -> int:
        return sum(output.bytes for output in self.saved_outputs if output.is_alive)

    def settle_outputs(self) -> None:
        """The backward begins: outputs that are alive now live on anyway."""
        self.output_saved += self._waiting_bytes
        self.saved_outputs = []

    def settle_inputs(self, *, may_be_dropped: bool) -> None:
        """Its caller has moved on: which of its inputs does only a recompute hold?

        None that another object still refers to (masks, collected states), nor any that the
        operator that made it saves (a ReLU between two blocks).
        """
        if may_be_dropped:
            self.droppable_input = sum(
                _bytes_behind(ref) for ref in self.unsaved_inputs if _is_held_once(ref)
            )
        self.unsaved_inputs = []
        self.movable_input = sum(_bytes_behind(ref) for ref in self.inputs if _is_held_once(ref))
        self.inputs = []

    def cost(self, start_before: int, nanoseconds: int, backward_nanoseconds: int) -> RunCost:
        """What counts of it; `start_before` is where the run before started."""
        boundary = self.start - start_before
        return RunCost(
            boundary=boundary,
            forward_peak=max(0, self.forward),
            backward_entry=0 if self.fixed else self.entry - self.start,
            saved=max(0, self.saved),
            recompute_peak=max(0, self.spike),
            backward_peak=max(0, self.back),
            output_saved=min(self.output_saved, max(0, self.saved)),
            droppable_input=self.droppable_input,
            between_blocks_peak=self.between - self.start,
            shared_casts=min(self.casts, max(0, self.saved - self.output_saved)),
            nanoseconds=nanoseconds,
            fixed=self.fixed,
            input_movable=0 < boundary <= self.movable_input,
            backward_nanoseconds=backward_nanoseconds,
        )


class SavedOutput:
    """An output that its run saves: does anything else hold it, too?"""

    __slots__ = ("_storage", "_uses", "bytes", "key", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        assert storage is not None
        self.tensor = weakref.ref(tensor)
        self.key, self.bytes = storage._cdata, allocated_bytes(storage)
        self._storage = weakref.ref(storage)
        self._uses = _use_count(self.key) if _use_count is not None else 0
        """How many tensors share its memory while the output itself is there."""

    @property
    def is_alive(self) -> bool:
        """Whether the model, or another tensor of its, still holds it."""
        if self.tensor() is not None:
            return True
        storage = self._storage()
        if storage is None or _use_count is None:
            return storage is not None
        return _use_count(storage._cdata) >= self._uses


def bytes_of_storages(tensors: list[torch.Tensor]) -> int:
    """The bytes of the storages behind these tensors, each once."""
    return sum(storage_bytes(tensors).values())


def _is_held_once(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether a recompute alone holds this tensor, and no other shares its memory."""
    return _references(ref) <= _ONE_HOLDER and _unshared(ref)


def _bytes_behind(ref: weakref.ref[torch.Tensor]) -> int:
    tensor = ref()
    storage = None if tensor is None else storage_of(tensor)
    return 0 if storage is None else allocated_bytes(storage)


def _references(ref: weakref.ref[torch.Tensor]) -> int:
    tensor = ref()
    return sys.getrefcount(tensor)


def _unshared(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether no other tensor, autograd's own included, shares its memory; but a view's base."""
    tensor = ref()
    return tensor is None or _users(tensor) <= _ONE_USER + tensor._is_view()


def _users(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None or _use_count is None else _use_count(storage._cdata)


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_held_once = torch.empty(0)
_ONE_HOLDER = _references(weakref.ref(_held_once))
"""What `_references` counts for a tensor that a single other holder refers to."""
_ONE_USER = _users(_held_once)
