"""Rerun a kept block, recomputed, when memory runs out in its forward.

The memory that the allocator loses between tensors can only be estimated in advance. If a plan
comes near the limit, its last kept blocks are guarded: the state that their forward depends on is
recorded. If one runs out of memory, it runs once more without keeping anything, as if so planned.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mimose.execution.buffers import BufferSlot, BufferSnapshot
from mimose.execution.context import generator_states
from mimose.execution.saved_arguments import copy_containers
from mimose.execution.second_run import Arguments, arguments_again
from mimose.tensors import argument_tensors, release_traceback


class Guard:
    """Records the state before a block's forward, so that the forward can run again."""

    __slots__ = ("_arguments", "_buffers", "_former", "_generators", "_handled", "_inputs")

    def __init__(self, changing: list[BufferSlot], args: Any, kwargs: Any) -> None:
        inputs = argument_tensors(args, kwargs)
        self._arguments, self._former = (args, kwargs), copy_containers(args, kwargs)
        self._generators = generator_states(inputs)
        self._buffers = BufferSnapshot(changing) if changing else None
        self._inputs = [(tensor, tensor._version) for tensor in inputs if not tensor.is_inference()]
        self._handled = sys.exc_info()[1]

    def arguments_again(self, *, own_caches: bool) -> Arguments | None:
        """The arguments with which the forward can run again.

        None if it has changed a tensor or a container among them.
        """
        if any(tensor._version != version for tensor, version in self._inputs):
            return None
        return arguments_again(self._arguments, self._former, own_caches=own_caches)

    def rewind(self, error: BaseException) -> None:
        """Free what the failed forward held, and restore the state before it."""
        release_traceback(error, keep=self._handled)
        for generator, state in self._generators:
            generator.set_state(state)
        if self._buffers is not None:
            self._buffers.restore()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
