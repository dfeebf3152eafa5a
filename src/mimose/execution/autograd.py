"""Report the begin and end of a block's forward and backward to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from mimose.tensors import task_id, tensors_in


class ForwardEnd(NamedTuple):
    """The tensors that a block's forward has received, returned and saved."""

    outputs: list[torch.Tensor]
    """The outputs, one for each storage that is not an argument's."""
    saved_outputs: list[torch.Tensor]
    """The outputs that the block saves for its backward, or would save if it were kept."""
    unsaved_inputs: list[torch.Tensor]
    """The inputs that the block does not save: only a recompute needs them."""
    saved_inside: int = 0
    """The bytes saved besides inputs, outputs and parameters, as far as hooks see them."""
    kept: bool = False
    """Whether the activations are kept."""
    inputs: Sequence[torch.Tensor] = ()
    """The tensors among the arguments."""


class Listener:
    """Receives the events of a block's calls; override the methods that are needed.

    `run` is the number of the call, from its directive. During the backward the methods are called
    on the backward's thread.
    """

    measures = True
    """Whether it receives all events; otherwise only `before_use` and the events of recomputes."""

    def forward_ends(self, run: int, end: ForwardEnd) -> None:
        """The forward of a block that can be recomputed has ended."""

    def awaits_backward(self, run: int) -> None:
        """The block has run, and its output requires a gradient."""

    def before_use(self, run: int) -> None:
        """The backward is about to use the first kept activation."""

    def before_recompute(self, run: int) -> None:
        """The backward needs the first activation, and all are about to be rebuilt."""

    def after_recompute(self, run: int) -> None:
        """All activations are rebuilt."""

    def backward_begins(self, run: int) -> None:
        """The gradient of the block's output has arrived."""

    def backward_ends(self, run: int) -> None:
        """The gradient of the block's input is complete.

        If no input comes from another operation, the whole backward is done.
        """


def with_graph(inputs: Any) -> torch.Tensor | None:
    """The first of a block's inputs through which the backward leaves the block; None if none."""
    return next((t for t in tensors_in(inputs) if t.grad_fn is not None), None)


def watch_backward(listener: Listener, run: int, source: torch.Tensor | None, out: Any) -> None:
    """Report to `listener` when the backward enters a block that has just run, and leaves it.

    `source` is the result of `with_graph` before the run, which may have changed its containers.
    """
    ends_with_backward = source is None  # the hooks must not hold the tensor itself
    last_task: list[object] = [None]

    def begin(*_: Any) -> None:
        task = task_id()
        if last_task[0] != task:  # report once, even if the block has several outputs
            last_task[0] = task
            listener.backward_begins(run)
            if ends_with_backward:
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
    """The autograd nodes through which a backward reaches these tensors.

    A view has two, its own and its base's: after an in-place change of the view, the backward
    runs only the base's.
    """
    nodes = set()
    for tensor in tensors:
        base = tensor._base
        nodes.add(tensor.grad_fn)
        nodes.add(None if base is None else base.grad_fn)
    return {node for node in nodes if node is not None}


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward is done. To be called inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def top_hooks() -> Any:
    """The saved-tensor hooks that would see a tensor saved now; None if none, or if unknown."""
    return None if _top_hooks is None else _top_hooks(True)


def hooks_are_active() -> bool:
    """Whether a tensor saved now would go to saved-tensor hooks; also if that is unknown."""
    return _top_hooks is None or _top_hooks(True) is not None


next_node: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""The number of the next node that autograd records on this thread; 0 if it does not tell."""
