"""Where a block's forward and backward begin and end: told to a listener, free without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node

from mimose.tensors import task_id, tensors_in


class Listener:
    """Observes blocks: is told of the moments whose methods it overrides.

    `block` is the number that the block's interceptor was given for this run. In the backward it is
    called on the thread that runs it.
    """

    def forward_ends(
        self, block: int, own_outputs: list[torch.UntypedStorage], idle_inputs: list[torch.Tensor]
    ) -> None:
        """The forward of a block that will be recomputed is done.

        `own_outputs` are those of its outputs that are among what it would have saved.
        `idle_inputs` are those of its inputs that it would not have saved: of the two, only a
        recompute needs them.
        """

    def awaits_backward(self, block: int) -> None:
        """The block has run, and its output depends on something that is trained."""

    def before_recompute(self, block: int) -> None:
        """The block's activations are about to be rebuilt."""

    def after_recompute(self, block: int) -> None:
        """They are all there."""

    def backward_begins(self, block: int) -> None:
        """The gradient of the block's output has arrived."""

    def backward_ends(self, block: int) -> None:
        """The gradient of the block's input is complete, or, where it needs none, all is done."""


def watch_backward(listener: Listener, block: int, inputs: Any, out: Any) -> None:
    """Tell `listener` when the backward enters a block that has just run, and when it leaves."""
    source = next((t for t in tensors_in(inputs) if t.grad_fn is not None), None)
    needs_end = source is None  # the hooks must not hold the tensor itself
    seen: list[object] = [None]

    def begin(*_: Any) -> None:
        run = task_id()
        if seen[0] != run:  # a block with several outputs is entered once
            seen[0] = run
            listener.backward_begins(block)
            if needs_end:
                at_end_of_backward(lambda: listener.backward_ends(block))

    def end(*_: Any) -> None:
        listener.backward_ends(block)

    nodes = nodes_of(tensors_in(out))
    for node in nodes:
        node.register_prehook(begin)
    if nodes:
        listener.awaits_backward(block)
    if source is not None:
        source.register_hook(end)  # runs before the hooks of the node that made it


def nodes_of(tensors: Iterable[torch.Tensor]) -> set[Node]:
    """The nodes at which a backward comes to these tensors.

    Of a view two: if somebody changes it in place, its own is gone, and its base's is not.
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
