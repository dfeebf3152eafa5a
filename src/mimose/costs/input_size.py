"""A batch's size: what of its shapes decides memory."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise

Layout = tuple[tuple[str, int], ...]
"""The name and the number of dimensions of each tensor."""


_NEXT = "+"
"""Before the name of the first tensor of each pass but the first."""
MOST_PASSES = 8
"""So many passes of a step are told apart; the last stands for all that come after it, too."""


@dataclass(frozen=True, slots=True)
class InputSize:
    """The shapes of all tensors in a forward's arguments.

    `layout` names each tensor and its number of dimensions; sizes of one layout can be compared.
    `dims` are all their dimensions in a row. Which of these vary, vary together or stand for the
    batch is found out by the estimator, from the sizes that it sees.

    A step may run the model several times before its backward: then it has the tensors of all its
    passes, in their order.
    """

    layout: Layout
    dims: tuple[int, ...]

    def __le__(self, other: InputSize) -> bool:
        """Whether no dimension is larger than the other's: then it needs no more memory."""
        return self.layout == other.layout and all(map(operator.le, self.dims, other.dims))

    def followed_by(self, other: InputSize) -> InputSize:
        """The size of a step in which a pass of that size comes after this; one of very many is
        joined with the last."""
        *before, last = self.passes
        if len(before) + 1 < MOST_PASSES:
            (name, rank), *others = other.layout
            layout = (*self.layout, (_NEXT + name, rank), *others)
            return InputSize(layout, (*self.dims, *other.dims))
        if last.layout != other.layout:
            return self
        return InputSize(self.layout, (*self.dims[: -len(last.dims)], *last.joined(other).dims))

    @property
    def passes(self) -> tuple[InputSize, ...]:
        """What it consists of: itself, unless it is the size of several passes."""
        starts = [i for i, (name, _) in enumerate(self.layout) if name.startswith(_NEXT)]
        if not starts:
            return (self,)
        passes, at = [], 0
        for begin, end in pairwise([0, *starts, len(self.layout)]):
            (name, rank), *others = self.layout[begin:end]
            layout = ((name.removeprefix(_NEXT), rank), *others)
            length = sum(rank for _, rank in layout)
            passes.append(InputSize(layout, self.dims[at : at + length]))
            at += length
        return tuple(passes)

    def with_pass(self, nth: int, other: InputSize) -> InputSize | None:
        """The same with another size for one pass; None if that one is laid out otherwise."""
        passes, nth = self.passes, min(nth, MOST_PASSES - 1)
        if nth >= len(passes) or passes[nth].layout != other.layout:
            return None
        begin = sum(len(one.dims) for one in passes[:nth])
        dims = (*self.dims[:begin], *other.dims, *self.dims[begin + len(other.dims) :])
        return InputSize(self.layout, dims)

    def joined(self, other: InputSize) -> InputSize:
        """The smallest size that covers both (of one layout)."""
        pairs = zip(self.dims, other.dims, strict=True)
        return InputSize(self.layout, tuple(max(pair) for pair in pairs))

    def __str__(self) -> str:
        shapes, at = [], 0
        for _, rank in self.layout:
            shapes.append(self.dims[at : at + rank])
            at += rank
        distinct = dict.fromkeys(shape for shape in shapes if len(shape) > 1) or {self.dims: None}
        return ", ".join("×".join(map(str, shape)) for shape in list(distinct)[:3])


def arguments_in_words(layout: Layout) -> str:
    """The tensors of a layout, for people.

    >>> arguments_in_words((("input_ids", 2), ("labels", 1)))
    'input_ids (2-d), labels (1-d)'
    """
    return ", ".join(f"{name} ({rank}-d)" for name, rank in layout)
