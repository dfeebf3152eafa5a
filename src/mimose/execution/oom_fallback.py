"""A kept block runs out of memory in its forward: run it again at once, recomputed.

How much of the memory that the allocator holds is lost between tensors can only be guessed in
advance. Where a plan comes near the limit its last kept blocks are guarded: what their forward
depends on is remembered, and when one of them fails it is simply run once more without keeping
anything, as if it had been planned so.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mimose.execution.buffers import BufferSlot, BufferSnapshot
from mimose.execution.context import generator_states
from mimose.tensors import argument_tensors, is_out_of_memory, release_traceback


class Guard:
    """The state before a block's forward."""

    __slots__ = ("_buffers", "_generators", "_handled", "_inputs")

    def __init__(self, changing: list[BufferSlot], args: Any, kwargs: Any) -> None:
        inputs = argument_tensors(args, kwargs)
        self._generators = generator_states(inputs)
        self._buffers = BufferSnapshot(changing) if changing else None
        self._inputs = [(tensor, tensor._version) for tensor in inputs if not tensor.is_inference()]
        self._handled = sys.exc_info()[1]

    def can_help(self, error: BaseException) -> bool:
        """Whether memory ran out and the block's inputs are still what they were."""
        intact = all(tensor._version == version for tensor, version in self._inputs)
        return intact and is_out_of_memory(error)

    def rewind(self, error: BaseException) -> None:
        """Let go of what the failed forward held; all is as before it."""
        release_traceback(error, keep=self._handled)
        for generator, state in self._generators:
            generator.set_state(state)
        if self._buffers is not None:
            self._buffers.restore()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
