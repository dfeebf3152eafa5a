"""The state before a forward, to undo it if it breaks off.

A forward breaks off if memory runs out in it, or if its code refuses saved-tensor hooks. Undone, it
can run again in another way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mimose.execution.arguments import ArgumentCopies
from mimose.execution.buffers import BufferSlot, BufferSnapshot
from mimose.execution.context import generator_states
from mimose.execution.later_changes import StateBeforeForward
from mimose.execution.on_host import ArgumentsOnHost
from mimose.execution.recompute import Frame
from mimose.execution.saved_arguments import ArgumentsSavedByGraph, SavedArguments
from mimose.execution.second_run import Arguments, nothing_stands_for
from mimose.execution.side_effects import AttributeSnapshot, FirstRunObserver
from mimose.execution.undo import put_back_buffers, put_back_plain_values
from mimose.tensors import argument_tensors


class BeforeForward(NamedTuple):
    """The state before a forward."""

    arguments: SavedArguments | ArgumentsSavedByGraph
    generators: list[tuple[torch.Generator, torch.Tensor]]
    buffers: BufferSnapshot | None
    given: ArgumentCopies | None = None
    attributes: AttributeSnapshot | FirstRunObserver | None = None
    others: StateBeforeForward | None = None
    """What no earlier forward had changed."""

    @classmethod
    def of_call(cls, changing: list[BufferSlot], args: Any, kwargs: Any) -> BeforeForward:
        """Before a forward without a frame, which changes nothing but these buffers."""
        tensors = argument_tensors(args, kwargs)
        buffers = BufferSnapshot(changing) if changing else None
        saved = SavedArguments(args, kwargs, tensors)
        return cls(saved, generator_states(tensors), buffers)

    @classmethod
    def of_frame(
        cls,
        frame: Frame,
        buffers: BufferSnapshot | None,
        given: ArgumentCopies | None,
        attributes: AttributeSnapshot | FirstRunObserver | None,
        others: StateBeforeForward | None,
    ) -> BeforeForward:
        """Before the forward of a frame, which notes its own arguments and generators."""
        saved = frame.saved_arguments
        assert not isinstance(saved, ArgumentsOnHost)  # they move after the forward
        generators = frame.execution_context.generators
        return cls(saved, generators, buffers, given, attributes, others)

    def put_back(self, args: Any, kwargs: Any, *, own_caches: bool) -> Arguments | None:
        """Undo the forward. Returns the arguments with which it can run again.

        None if it has changed something that cannot be restored. Caches among the arguments can be
        if they are this call's own.
        """
        again = self._arguments_again(args, kwargs, own_caches=own_caches)
        if again is None:
            return None
        changes = None if self.others is None else self.others.new_changes()
        if changes is not None:
            put_back_buffers(BufferSnapshot.of(changes.buffers), args, kwargs)
            if changes.lost or changes.parameter or not put_back_plain_values(changes.attributes):
                return None
        if self.attributes is not None and not self.attributes.put_back():
            return None
        if self.buffers is not None:
            put_back_buffers(self.buffers, args, kwargs)
        for generator, state in self.generators:
            generator.set_state(state)
        return again

    def _arguments_again(self, args: Any, kwargs: Any, *, own_caches: bool) -> Arguments | None:
        given = self.given
        if self.arguments.changed:
            return None
        copied = nothing_stands_for if given is None else given.stands_for
        again = self.arguments.again((args, kwargs), copied, own_caches=own_caches)
        return again if given is None or given.changed() is None else None
