"""The bytes of gradients that steps allocate before each run's backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimose.costs import Pattern

_UNLIMITED = 1 << 62
"""Stands for the gradients of all parameters that have none yet, where the number is unknown."""


class AllocatedGradients:
    """The most bytes of gradients that a step has allocated, for each pattern of runs.

    A step in which some gradients existed already has allocated fewer, so the maximum counts. Steps
    that allocate most gradients and steps that add to existing ones are recorded separately.
    """

    def __init__(self) -> None:
        self._most: dict[tuple[Pattern, bool], tuple[int, ...]] = {}
        """By (pattern, allocates): bytes before each run's backward, then in the whole step."""

    def note(
        self,
        pattern: Pattern,
        allocated: Sequence[int],
        all_allocated: int | None,
        *,
        allocates: bool,
    ) -> bool:
        """Record bytes allocated before each run's backward, and in all (None if unknown).

        Returns whether any of them is more than was known.
        """
        new = (*allocated, _UNLIMITED if all_allocated is None else all_allocated)
        most = self._most.get((pattern, allocates))
        self._most[pattern, allocates] = now = tuple(map(max, most, new)) if most else new
        return now != most

    def expected(
        self, pattern: Pattern, missing_bytes: int, *, allocates: bool
    ) -> tuple[tuple[int, ...], int]:
        """The bytes that a step will allocate before each run's backward, and in all.

        `missing_bytes` is the size of the gradients that do not exist at its start.
        """
        if not missing_bytes:
            return (0,) * len(pattern), 0
        most = self._most.get((pattern, allocates)) or self._most.get((pattern, not allocates))
        if most is None:  # unknown: assume that the first backward allocates all of them
            return (missing_bytes,) * len(pattern), missing_bytes
        *before, in_all = [min(allocated, missing_bytes) for allocated in most]
        return tuple(before), in_all

    def clear(self) -> None:
        self._most.clear()

    def to_plain(self) -> list[Any]:
        """Lists of numbers, for JSON."""
        return [
            [list(map(list, pattern)), list(numbers), allocates]
            for (pattern, allocates), numbers in self._most.items()
        ]

    def note_plain(self, plain: Mapping[str, Any]) -> None:
        """Record what a file has: the result of `to_plain` as "gradients", or its older forms."""
        older = [
            *plain.get("born", ()),
            *([*row, False] for row in plain.get("born_beside", ())),
        ]
        for pattern, numbers, *allocates in plain.get("gradients", older):
            runs = tuple((int(block), int(nth)) for block, nth in pattern)
            *before, in_all = [*map(int, numbers)]
            if len(numbers) == len(runs):  # older versions stored no total
                before, in_all = [*before, in_all], _UNLIMITED
            if len(before) != len(runs):
                raise ValueError(f"gradients of {len(numbers)} runs where there are {len(runs)}")
            self.note(runs, before, in_all, allocates=bool(allocates[0]) if allocates else True)
