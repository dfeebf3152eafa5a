"""What a frame does besides its work while its step is observed."""

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
    """Tells a listener of one run: what its forward saved, and when its activations are used."""

    __slots__ = ("_in_use", "_node", "_storages", "listener", "parameters", "run")

    def __init__(self, listener: Listener, run: int) -> None:
        self.listener, self.run = listener, run
        self._storages: list[weakref.ref[Any]] = []
        self.parameters: set[int] = set()
        """Which of the tensors that are kept are parameters."""
        self._node = -1
        self._in_use: list[torch.Tensor] = []
        """What the node of that number has unpacked and is working with."""

    def saves(self, tensor: torch.Tensor) -> None:
        """The forward would save this tensor, and nothing of it is kept."""
        if not is_parameter(tensor):
            storage = storage_of(tensor)
            if storage is not None:
                self._storages.append(weakref.ref(storage))

    def forward_ends(
        self, args: Any, kwargs: Any, out: Any, kept: Sequence[torch.Tensor] | None
    ) -> None:
        """The forward is done; `kept` are its activations, None if they are not kept."""
        packed = self._packed(kept)
        saved = packed.keys()
        inputs = argument_tensors(args, kwargs)
        given = storages_in(inputs)
        made = {
            storage._cdata: tensor
            for tensor in tensors_in(out)
            if (storage := storage_of(tensor)) is not None and storage._cdata not in given
        }
        own = [tensor for key, tensor in made.items() if key in saved]
        idle = [t for t in inputs if (s := storage_of(t)) is not None and s._cdata not in saved]
        inside = packed.keys() - given.keys() - made.keys()
        explained = sum(allocated_bytes(packed[key]) for key in inside)
        end = ForwardEnd(list(made.values()), own, idle, explained, kept is not None, inputs)
        self.listener.forward_ends(self.run, end)

    def _packed(self, kept: Sequence[torch.Tensor] | None) -> dict[int, Any]:
        """The storages that the forward saves, but those of parameters, by their address."""
        if kept is None:
            storages = [ref() for ref in self._storages]
            self._storages = []
        else:
            storages = [storage_of(t) for k, t in enumerate(kept) if k not in self.parameters]
        return {s._cdata: s for s in storages if s is not None}

    def hold_until_used(self, tensor: torch.Tensor) -> None:
        """Keep a rebuilt tensor alive for as long as a kept one would be: to the end of its node.

        A node lets go of what it unpacked as it goes along, PyTorch's own ones on CUDA too; what
        was kept stays until it is done, and a workspace that it takes in between then comes on top.
        Without this, peaks of BERT-base on an H200 were told 0.2 to 1.2 % too low.
        """
        node = _current_node()
        if node is None:
            return
        number = node._sequence_nr()
        if number != self._node:  # the first tensor that this one unpacks
            box: list[torch.Tensor] = []
            self._node, self._in_use = number, box
            node.register_hook(lambda *_: box.clear())
        self._in_use.append(tensor)


_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
