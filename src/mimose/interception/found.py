"""Combine the state that a forward started from, which its recompute needs, into one object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mimose.execution import (
    ArgumentCopies,
    AttributeSnapshot,
    BufferSlot,
    BufferSnapshot,
    Found,
    SwappedParameters,
)


def found_as_one(
    exchanged: SwappedParameters | None,
    changing: list[BufferSlot],
    attributes_before: AttributeSnapshot | None,
    given: ArgumentCopies | None,
) -> Found | None:
    """The present state that a recompute must restore; None if there is none.

    Call it before the forward.
    """
    buffers = BufferSnapshot(changing) if changing else None
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
