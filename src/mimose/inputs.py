"""A batch's size: what of its shapes decides memory."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from mimose.errors import ArgumentError

SizeFunction = Callable[..., "int | Sequence[int]"]
"""A user's own measure: of the forward's arguments, one number or several."""


Layout = tuple[tuple[str, int], ...]
"""The name and the number of dimensions of each tensor."""


_NEXT = "+"
"""Before the name of the first tensor of each pass but the first."""
MOST_PASSES = 8
"""So many passes of a step are told apart; the last stands for all that come after it, too."""

FINEST = 512
"""Dimensions up to here are not rounded."""


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

    def shares_between(self, low: InputSize, high: InputSize) -> list[float]:
        """How far it lies on the way from a smaller to a larger size, in each dimension that
        differs between them."""
        dims = zip(low.dims, self.dims, high.dims, strict=True)
        return [(x - a) / (b - a) for a, x, b in dims if b > a]

    def rounded_up(self, positions: Container[int] | None = None) -> InputSize:
        """A size that is at most 0.4 % larger in any dimension, or in those at `positions`."""
        if max(self.dims, default=0) < FINEST:
            return self
        return InputSize(
            self.layout,
            tuple(
                _rounded(d) if positions is None or i in positions else d
                for i, d in enumerate(self.dims)
            ),
        )

    def __str__(self) -> str:
        shapes, at = [], 0
        for _, rank in self.layout:
            shapes.append(self.dims[at : at + rank])
            at += rank
        distinct = dict.fromkeys(shape for shape in shapes if len(shape) > 1) or {self.dims: None}
        return ", ".join("×".join(map(str, shape)) for shape in list(distinct)[:3])


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """What a function calls its arguments, in their order; as far as they have names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in named)


def input_size(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] = ()
) -> InputSize:
    """The size of a batch, from every tensor in a forward's arguments, at any depth.

    `names` are what the forward calls them: given by position or by name, they are the same. Single
    numbers have no size.

    >>> str(input_size((torch.zeros(32, 128),), {"mask": torch.zeros(32, 128)}))
    '32×128'
    """
    layout: list[tuple[str, int]] = []
    dims: list[int] = []
    given = dict(zip(names, args, strict=False))
    rest = [(str(at), value) for at, value in enumerate(args) if at >= len(names)]
    later = [(name, kwargs[name]) for name in names if name in kwargs and name not in given]
    others = [(name, kwargs[name]) for name in sorted(kwargs) if name not in names]
    for name, value in (*given.items(), *rest, *later, *others):
        _collect(name, value, layout, dims)
    if not layout:
        raise ArgumentError(
            "the forward got no tensors, so its input has no size: pass "
            "input_size=lambda *args, **kwargs: … that returns one number or several"
        )
    return InputSize(tuple(layout), tuple(dims))


def refuse_other_arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse what `explain` was given if the model's forward could not be called with it."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        keys = [str(key) for key in args[0]]
        if keys and all(key in signature.parameters for key in keys):
            raise ArgumentError(
                "explain got the batch as one argument, and the model's forward takes "
                f"{', '.join(keys)} each by name: write explain(**batch)"
            )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"the model's forward cannot be called with this ({error}): explain takes what the "
            "forward takes, like explain(**batch)"
        ) from None


def arguments_in_words(layout: Layout) -> str:
    """The tensors of a layout, for people.

    >>> arguments_in_words((("input_ids", 2), ("labels", 1)))
    'input_ids (2-d), labels (1-d)'
    """
    return ", ".join(f"{name} ({rank}-d)" for name, rank in layout)


def _rounded(dimension: int) -> int:
    grain = 1 << max(0, dimension.bit_length() - 9)
    return -(-dimension // grain) * grain


def _collect(name: str, value: Any, layout: list[tuple[str, int]], dims: list[int]) -> None:
    if isinstance(value, torch.Tensor):
        # One that is ragged has its number of rows, and what is in them.
        shape = (value.size(0), value.numel()) if value.is_nested else value.shape
        if shape:
            layout.append((name, len(shape)))
            dims.extend(shape)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _collect(f"{name}.{index}", item, layout, dims)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{name}.{key}", item, layout, dims)


def measured_by(
    function: SizeFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InputSize:
    """The size of a batch by a user's own function."""
    try:
        measure = function(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"input_size= cannot be called as the forward is ({error}): it gets the same "
            "arguments, e.g. lambda input_ids, **_: tuple(input_ids.shape)"
        ) from error
    try:
        several = measure if isinstance(measure, Iterable) else (measure,)
        numbers = tuple(operator.index(number) for number in several)
    except TypeError:
        numbers = ()
    if not numbers or min(numbers) < 0:
        raise ArgumentError(
            f"input_size= returned {reprlib.repr(measure)}: return one whole number or several, "
            "e.g. lambda input_ids, **_: tuple(input_ids.shape)"
        )
    return InputSize((("input_size", len(numbers)),), numbers)
