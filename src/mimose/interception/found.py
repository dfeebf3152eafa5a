"""What a forward finds, as one value: a recompute finds the same."""

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
    """What a forward that begins now finds, if a recompute may find something else."""
    buffers = BufferSnapshot(changing) if changing else None
    things = [
        thing for thing in (exchanged, buffers, attributes_before, given) if thing is not None
    ]
    if len(things) > 1:
        return SeveralFound(things)
    return things[0] if things else None


class SeveralFound:
    """Several things that a forward found, as one."""

    __slots__ = ("_things",)

    def __init__(self, things: Sequence[Found | None]) -> None:
        self._things = [thing for thing in things if thing is not None]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        for thing in self._things:
            function = functools.partial(thing.run, function)
        return function(*args)
