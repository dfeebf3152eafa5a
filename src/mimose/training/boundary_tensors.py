"""The inputs and outputs of a run: which of them live on whether it is kept or recomputed?"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from mimose.execution import ForwardEnd
from mimose.tensors import allocated_bytes, storage_bytes, storage_of, storages_in


class BoundaryTensors:
    """What is known so far of the tensors that a run takes and returns."""

    __slots__ = (
        "droppable_input",
        "inputs",
        "movable_input",
        "output_bytes",
        "output_saved",
        "saved_outputs",
        "shared_inputs",
        "unsaved_inputs",
    )

    def __init__(self, shared_inputs: list[weakref.ref[torch.Tensor]]) -> None:
        self.shared_inputs = shared_inputs
        """Inputs that the run before saves: where that is kept, they outlive this one's
        backward."""
        self.unsaved_inputs: list[weakref.ref[torch.Tensor]] = []
        self.droppable_input = 0
        """Bytes of inputs that only a recompute holds."""
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        """Inputs that depend on something trained, if the run is recomputed."""
        self.movable_input = 0
        """Bytes of its input that come free if its recompute does not hold on to them."""
        self.saved_outputs: list[SavedOutput] = []
        """Outputs that it saves, and that no run has been given yet."""
        self.output_bytes = 0
        self.output_saved = 0
        """Bytes of outputs that it saves and that live on anyway."""

    def forward_ends(self, end: ForwardEnd) -> None:
        """The run's forward is over."""
        self.saved_outputs = [SavedOutput(tensor) for tensor in end.saved_outputs]
        self.unsaved_inputs = [
            weakref.ref(tensor) for tensor in end.unsaved_inputs if tensor.grad_fn is not None
        ]
        self.output_bytes = bytes_of_storages(end.outputs)
        if not end.kept:
            self.inputs = [weakref.ref(t) for t in end.inputs if t.grad_fn is not None]

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
    def waiting_bytes(self) -> int:
        """Bytes of saved outputs that no run has been given yet, and that are still alive."""
        return sum(output.bytes for output in self.saved_outputs if output.is_alive)

    def settle_outputs(self) -> None:
        """The backward begins: outputs that are alive now live on anyway."""
        self.output_saved += self.waiting_bytes
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
        movable = sum(_bytes_behind(ref) for ref in self.inputs if _is_held_once(ref))
        self.movable_input = max(self.movable_input, movable)  # maybe it has left already
        self.inputs = []


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
