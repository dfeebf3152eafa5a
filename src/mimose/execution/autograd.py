"""Where a block's forward and backward begin and end: told to a listener, free without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from mimose.tensors import task_id, tensors_in


class ForwardEnd(NamedTuple):
    """What a block's forward has made, and what it has left alone."""

    outputs: list[torch.Tensor]
    """Its outputs, one for each storage that did not come in as an argument."""
    saved_outputs: list[torch.Tensor]
    """Those of them that it saves for its backward, or would save."""
    unsaved_inputs: list[torch.Tensor]
    """Its inputs that it does not save: only a recompute needs them."""
    saved_inside: int = 0
    """The bytes of what it saves besides inputs, outputs and parameters, as far as hooks see it."""
    kept: bool = False
    """Whether its activations are there."""
    inputs: Sequence[torch.Tensor] = ()
    """Its arguments."""


class Listener:
    """Is told of the moments in a block's call whose methods it overrides.

    `run` is the number that the directive gave to this call. In the backward the methods are called
    on the thread that runs it.
    """

    measures = True
    """Whether it is told of everything; else only of what comes before use and recompute."""

    def forward_ends(self, run: int, end: ForwardEnd) -> None:
        """The forward of a block that can be recomputed is done."""

    def awaits_backward(self, run: int) -> None:
        """The block has run, and its output depends on something that is trained."""

    def before_use(self, run: int) -> None:
        """The backward asks for the first of the activations that the block has kept."""

    def before_recompute(self, run: int) -> None:
        """The backward asks for the first of the activations, and they are about to be rebuilt."""

    def after_recompute(self, run: int) -> None:
        """They are all there."""

    def backward_begins(self, run: int) -> None:
        """The gradient of the block's output has arrived."""

    def backward_ends(self, run: int) -> None:
        """The gradient of the block's input is complete, or, where it needs none, all is done."""


def watch_backward(listener: Listener, run: int, inputs: Any, out: Any) -> None:
    """Tell `listener` when the backward enters a block that has just run, and when it leaves."""
    source = next((t for t in tensors_in(inputs) if t.grad_fn is not None), None)
    needs_end = source is None  # the hooks must not hold the tensor itself
    seen: list[object] = [None]

    def begin(*_: Any) -> None:
        task = task_id()
        if seen[0] != task:  # a block with several outputs is entered once
            seen[0] = task
            listener.backward_begins(run)
            if needs_end:
                at_end_of_backward(lambda: listener.backward_ends(run))

    def end(*_: Any) -> None:
        listener.backward_ends(run)

    nodes = nodes_of(tensors_in(out))
    for node in nodes:
        node.register_prehook(begin)
    if nodes:
        listener.awaits_backward(run)
    if source is not None:
        source.register_hook(end)  # runs before the hooks of the node that made it


def nodes_of(tensors: Iterable[torch.Tensor]) -> set[Node]:
    """The nodes at which a backward comes to these tensors.

    A view has two: if it is changed in place, its own is gone, and its base's is not.
    """
    nodes = set()
    for tensor in tensors:
        base = tensor._base
        nodes.add(tensor.grad_fn)
        nodes.add(None if base is None else base.grad_fn)
    return {node for node in nodes if node is not None}


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once the running backward is done. For use inside one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
