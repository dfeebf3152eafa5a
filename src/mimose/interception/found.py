"""The state that a forward started from, for its recompute, or to undo it if it breaks off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mimose.execution import (
    ArgumentCopies,
    AttributeSnapshot,
    BufferSnapshot,
    FirstRunObserver,
    Found,
    Frame,
    StateBeforeForward,
    SwappedParameters,
    put_back_buffers,
    put_back_plain_values,
)


def found_as_one(
    exchanged: SwappedParameters | None,
    buffers: BufferSnapshot | None,
    attributes_before: AttributeSnapshot | None,
    given: ArgumentCopies | None,
) -> Found | None:
    """The state before a forward, which its recompute must restore; None if there is none."""
    states = [
        state for state in (exchanged, buffers, attributes_before, given) if state is not None
    ]
    if len(states) > 1:
        return SeveralFound(states)
    return states[0] if states else None


class SeveralFound:
    """Several states that a forward started from, restored together."""

    __slots__ = ("_states",)

    def __init__(self, states: Sequence[Found | None]) -> None:
        self._states = [state for state in states if state is not None]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        for state in self._states:
            function = functools.partial(state.run, function)
        return function(*args)


class BeforeForward(NamedTuple):
    """The state before a forward that broke off."""

    frame: Frame
    given: ArgumentCopies | None
    buffers: BufferSnapshot | None
    attributes: AttributeSnapshot | FirstRunObserver | None
    others: StateBeforeForward | None
    """What no earlier forward had changed."""

    def put_back(self, args: Any, kwargs: Any, *, own_caches: bool) -> tuple[Any, Any] | None:
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
            if changes.lost or not put_back_plain_values(changes.attributes):
                return None
        if self.attributes is not None and not self.attributes.put_back():
            return None
        if self.buffers is not None:
            put_back_buffers(self.buffers, args, kwargs)
        for generator, state in self.frame.execution_context.generators:
            generator.set_state(state)
        return again

    def _arguments_again(
        self, args: Any, kwargs: Any, *, own_caches: bool
    ) -> tuple[Any, Any] | None:
        given = self.given
        again = self.frame.arguments_again((args, kwargs), given, own_caches=own_caches)
        return again if given is None or given.changed() is None else None
