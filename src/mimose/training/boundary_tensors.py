"""Measures which inputs and outputs of a run stay alive, whether it is kept or recomputed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from mimose.execution import ForwardEnd
from mimose.tensors import allocated_bytes, storage_bytes, storage_of, storages_in


class BoundaryTensors:
    """What has been measured so far of the inputs and outputs of one run."""

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
        """Inputs that the previous run saves. If that run is kept, they outlive this run's
        backward."""
        self.unsaved_inputs: list[weakref.ref[torch.Tensor]] = []
        self.droppable_input = 0
        """Bytes of inputs that only a recompute of this run would hold."""
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        """Inputs that depend on trained parameters; empty if the run is kept."""
        self.movable_input = 0
        """Bytes of inputs that are freed if the recompute does not hold them."""
        self.saved_outputs: list[SavedOutput] = []
        """Outputs that the run saves, and that have not been passed to another run yet."""
        self.output_bytes = 0
        self.output_saved = 0
        """Bytes of outputs that the run saves, and that stay alive even if it is recomputed."""

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
        """The next run takes these arguments: saved outputs among them stay alive anyway.

        Saved outputs that the model has dropped (such as unused attention weights) stay alive only
        while this run is kept. Returns the saved outputs that were passed on.
        """
        given = storages_in((args, kwargs))
        passed = [output for output in self.saved_outputs if output.key in given]
        self.output_saved += sum(output.bytes for output in passed)
        self.saved_outputs = [output for output in self.saved_outputs if output.key not in given]
        return [output.tensor for output in passed]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of saved outputs that are alive and have not been passed to another run yet."""
        return sum(output.bytes for output in self.saved_outputs if output.is_alive)

    def settle_outputs(self) -> None:
        """The backward begins: saved outputs that are alive now stay alive anyway."""
        self.output_saved += self.waiting_bytes
        self.saved_outputs = []

    def settle_inputs(self, *, may_be_dropped: bool) -> None:
        """The caller has moved on: find the inputs that only a recompute would hold.

        These exclude inputs that another object refers to (masks, collected states) and inputs
        that their own operator saves (a ReLU between two blocks).
        """
        if may_be_dropped:
            self.droppable_input = sum(
                _bytes_behind(ref) for ref in self.unsaved_inputs if _is_held_once(ref)
            )
        self.unsaved_inputs = []
        movable = sum(_bytes_behind(ref) for ref in self.inputs if _is_held_once(ref))
        self.movable_input = max(self.movable_input, movable)  # it may have left already
        self.inputs = []


class SavedOutput:
    """An output that its run saves; detects whether anything else holds it."""

    __slots__ = ("_storage", "_uses", "bytes", "key", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        assert storage is not None
        self.tensor = weakref.ref(tensor)
        self.key, self.bytes = storage._cdata, allocated_bytes(storage)
        self._storage = weakref.ref(storage)
        self._uses = _use_count(self.key) if _use_count is not None else 0
        """The number of tensors that share its memory while the output itself is alive."""

    @property
    def is_alive(self) -> bool:
        """Whether the model still holds the output, or another tensor shares its memory."""
        if self.tensor() is not None:
            return True
        storage = self._storage()
        if storage is None or _use_count is None:
            return storage is not None
        return _use_count(storage._cdata) >= self._uses


def bytes_of_storages(tensors: list[torch.Tensor]) -> int:
    """The bytes of the storages of these tensors, each counted once."""
    return sum(storage_bytes(tensors).values())


def _is_held_once(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether only a recompute holds this tensor, and no other tensor shares its memory."""
    return _references(ref) <= _ONE_HOLDER and _unshared(ref)


def _bytes_behind(ref: weakref.ref[torch.Tensor]) -> int:
    tensor = ref()
    storage = None if tensor is None else storage_of(tensor)
    return 0 if storage is None else allocated_bytes(storage)


def _references(ref: weakref.ref[torch.Tensor]) -> int:
    tensor = ref()
    return sys.getrefcount(tensor)


def _unshared(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether no other tensor (of autograd, too) shares its memory, except a view's base."""
    tensor = ref()
    return tensor is None or _users(tensor) <= _ONE_USER + tensor._is_view()


def _users(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None or _use_count is None else _use_count(storage._cdata)


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_example = torch.empty(0)
_ONE_HOLDER = _references(weakref.ref(_example))
"""The result of `_references` for a tensor with a single holder."""
_ONE_USER = _users(_example)
