"""The input size of a step: the shapes of all tensors that its forwards got."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import NamedTuple

Layout = tuple[tuple[str, int], ...]
"""The name and the number of dimensions of each tensor."""

_NEXT_PASS = "+"
"""Prefix of the first tensor's name in each pass after the first."""
_NO_TENSORS: Layout = (("", 0),)
"""Stands for a pass without tensors among several passes."""
MOST_PASSES = 8
"""The most passes that an input size has. The last one also stands for all later passes."""


class InputSize(NamedTuple):
    """The shapes of all tensors in a forward's arguments.

    `layout` has the name and rank of each tensor; sizes of the same layout can be compared. `dims`
    are the dimensions of all tensors, concatenated. The estimator finds out from observed sizes
    which of them vary, which vary together and which is the batch.

    A step may run several forward passes before its backward. Its size then has the tensors of all
    passes, in order.

    A tuple, because every step looks sizes up in several dicts.
    """

    layout: Layout
    dims: tuple[int, ...]

    def __le__(self, other: InputSize) -> bool:  # type: ignore[override]
        """Whether no dimension is larger than the other's, so that it needs no more memory."""
        return self.layout == other.layout and all(map(operator.le, self.dims, other.dims))

    def __ge__(self, other: InputSize) -> bool:  # type: ignore[override]
        return other <= self

    def __lt__(self, other: object) -> bool:
        raise TypeError("of two input sizes, neither may be the smaller one: compare them by <=")

    def __gt__(self, other: object) -> bool:
        return self < other

    def followed_by(self, other: InputSize) -> InputSize:
        """The size of a step with one more pass.

        Beyond `MOST_PASSES`, the last pass becomes the maximum of itself and the new one.
        """
        *before, last = self.passes
        if len(before) + 1 < MOST_PASSES:
            (name, rank), *others = other.layout or _NO_TENSORS
            layout = (*(self.layout or _NO_TENSORS), (_NEXT_PASS + name, rank), *others)
            return InputSize(layout, (*self.dims, *other.dims))
        if last.layout != other.layout:
            return self
        return InputSize(self.layout, (*self.dims[: -len(last.dims)], *last.joined(other).dims))

    @property
    def passes(self) -> tuple[InputSize, ...]:
        """The size of each pass."""
        starts = [i for i, (name, _) in enumerate(self.layout) if name.startswith(_NEXT_PASS)]
        if not starts:
            return (self,)
        passes, at = [], 0
        for begin, end in pairwise([0, *starts, len(self.layout)]):
            (name, rank), *others = self.layout[begin:end]
            layout = ((name.removeprefix(_NEXT_PASS), rank), *others)
            length = sum(rank for _, rank in layout)
            layout = () if layout == _NO_TENSORS else layout
            passes.append(InputSize(layout, self.dims[at : at + length]))
            at += length
        return tuple(passes)

    def with_pass(self, nth: int, other: InputSize) -> InputSize | None:
        """A copy with another size for pass `nth` (0 = first); None if the layouts differ."""
        passes, nth = self.passes, min(nth, MOST_PASSES - 1)
        if nth >= len(passes) or passes[nth].layout != other.layout:
            return None
        begin = sum(len(one.dims) for one in passes[:nth])
        dims = (*self.dims[:begin], *other.dims, *self.dims[begin + len(other.dims) :])
        return InputSize(self.layout, dims)

    def joined(self, other: InputSize) -> InputSize:
        """The larger of both in each dimension; both must have the same layout."""
        pairs = zip(self.dims, other.dims, strict=True)
        return InputSize(self.layout, tuple(max(pair) for pair in pairs))

    def __str__(self) -> str:
        if not self.dims:
            return "without tensors"
        shapes, at = [], 0
        for _, rank in self.layout:
            shapes.append(self.dims[at : at + rank])
            at += rank
        distinct = dict.fromkeys(shape for shape in shapes if len(shape) > 1) or {self.dims: None}
        return ", ".join("×".join(map(str, shape)) for shape in list(distinct)[:3])


def arguments_in_words(layout: Layout) -> str:
    """The tensors of a layout as readable text.

    >>> arguments_in_words((("input_ids", 2), ("labels", 1)))
    'input_ids (2-d), labels (1-d)'
    """
    return ", ".join(f"{name} ({rank}-d)" for name, rank in layout) or "no tensors"
