"""Observe what a frame saves and uses, for a step that is measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mimose.execution.autograd import ForwardEnd, Listener
from mimose.tensors import (
    allocated_bytes,
    argument_tensors,
    is_parameter,
    storage_of,
    storages_in,
    tensors_in,
)


class FrameObserver:
    """Reports to a listener what the forward of one run saved. Holds rebuilt tensors in use."""

    __slots__ = (
        "_given",
        "_in_use",
        "_inputs",
        "_node",
        "_storages",
        "listener",
        "parameters",
        "run",
    )

    def __init__(self, listener: Listener, run: int, args: Any, kwargs: Any) -> None:
        self.listener, self.run = listener, run
        # Noted before the forward, which may change the containers among its arguments.
        self._inputs = argument_tensors(args, kwargs)
        self._given = storages_in((args, kwargs))
        self._storages: list[weakref.ref[Any]] = []
        self.parameters: set[int] = set()
        """The indices of kept tensors that are parameters."""
        self._node = -1
        self._in_use: list[torch.Tensor] = []
        """The tensors that the node with sequence number `_node` has unpacked and still uses."""

    def saves(self, tensor: torch.Tensor) -> None:
        """The forward would save this tensor, but its activations are not kept."""
        if not is_parameter(tensor):
            storage = storage_of(tensor)
            if storage is not None:
                self._storages.append(weakref.ref(storage))

    def has_kept(self, kept: Sequence[torch.Tensor], out: Any) -> None:
        """The forward is done, and has kept these activations."""
        saved = [storage_of(t) for k, t in enumerate(kept) if k not in self.parameters]
        self._report(out, saved, kept=True)

    def forward_ends(self, out: Any) -> None:
        """The forward is done, and its activations are gone."""
        saved = [ref() for ref in self._storages]
        self._storages = []
        self._report(out, saved, kept=False)

    def _report(self, out: Any, storages: Sequence[Any], *, kept: bool) -> None:
        """Report the end of a forward that saves these storages, without those of parameters."""
        saved = {s._cdata: s for s in storages if s is not None}
        inputs, given = self._inputs, self._given
        self._inputs, self._given = [], {}
        made = {
            storage._cdata: tensor
            for tensor in tensors_in(out)
            if (storage := storage_of(tensor)) is not None and storage._cdata not in given
        }
        saved_outputs = [tensor for key, tensor in made.items() if key in saved]
        unsaved = [t for t in inputs if (s := storage_of(t)) is not None and s._cdata not in saved]
        inside = saved.keys() - given.keys() - made.keys()
        inside_bytes = sum(allocated_bytes(saved[key]) for key in inside)
        end = ForwardEnd(list(made.values()), saved_outputs, unsaved, inside_bytes, kept, inputs)
        self.listener.forward_ends(self.run, end)

    def hold_until_used(self, tensor: torch.Tensor) -> None:
        """Keep a rebuilt tensor alive until its node has run, like a kept one.

        Nodes release unpacked tensors earlier, PyTorch's own nodes on CUDA too. A workspace that
        they allocate afterwards would be missing from the peak: 0.2 to 1.2 % on BERT-base, H200.
        """
        node = _current_node()
        if node is None:
            return
        number = node._sequence_nr()
        if number != self._node:  # the first tensor that this node unpacks
            in_use: list[torch.Tensor] = []
            self._node, self._in_use = number, in_use
            node.register_hook(lambda *_: in_use.clear())
        self._in_use.append(tensor)


_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
