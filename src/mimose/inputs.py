"""A batch's size: what of its shapes decides memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mimose.errors import ArgumentError

SizeFunction = Callable[..., "int | Sequence[int]"]
"""A user's own measure: of the forward's arguments, one number or several."""


Layout = tuple[tuple[str, int], ...]
"""The name and the number of dimensions of each tensor."""


@dataclass(frozen=True, slots=True)
class InputSize:
    """The shapes of all tensors in a forward's arguments.

    `layout` names each tensor and its number of dimensions; sizes of one layout can be compared.
    `dims` are all their dimensions in a row. Which of these vary, vary together or stand for the
    batch is found out by the estimator, from the sizes that it sees.
    """

    layout: Layout
    dims: tuple[int, ...]

    def __le__(self, other: InputSize) -> bool:
        """Whether no dimension is larger than the other's: then it needs no more memory."""
        return self.layout == other.layout and all(
            a <= b for a, b in zip(self.dims, other.dims, strict=True)
        )

    def joined(self, other: InputSize) -> InputSize:
        """The smallest size that covers both (of one layout)."""
        pairs = zip(self.dims, other.dims, strict=True)
        return InputSize(self.layout, tuple(max(pair) for pair in pairs))

    def rounded_up(self) -> InputSize:
        """The size whose plan this one may share: at most 0.4 % larger in any dimension."""
        if max(self.dims, default=0) < 512:
            return self
        grain = [1 << max(0, d.bit_length() - 9) for d in self.dims]
        pairs = zip(self.dims, grain, strict=True)
        return InputSize(self.layout, tuple(-(-d // g) * g for d, g in pairs))

    def __str__(self) -> str:
        shapes, at = [], 0
        for _, rank in self.layout:
            shapes.append(self.dims[at : at + rank])
            at += rank
        distinct = dict.fromkeys(shape for shape in shapes if len(shape) > 1) or {self.dims: None}
        return ", ".join("×".join(map(str, shape)) for shape in list(distinct)[:3])


def input_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputSize:
    """The size of a batch, from every tensor in a forward's arguments, at any depth.

    >>> str(input_size((torch.zeros(32, 128),), {"mask": torch.zeros(32, 128)}))
    '32×128'
    """
    layout: list[tuple[str, int]] = []
    dims: list[int] = []
    for index, value in enumerate(args):
        _collect(str(index), value, layout, dims)
    for name, value in kwargs.items():
        _collect(name, value, layout, dims)
    if not layout:
        raise ArgumentError(
            "the forward got no tensors, so its input has no size: pass "
            "input_size=lambda *args, **kwargs: … that returns one number or several"
        )
    return InputSize(tuple(layout), tuple(dims))


def _collect(name: str, value: Any, layout: list[tuple[str, int]], dims: list[int]) -> None:
    if isinstance(value, torch.Tensor):
        layout.append((name, value.dim()))
        dims.extend(value.shape)
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
    measure = function(*args, **kwargs)
    numbers = (measure,) if isinstance(measure, int) else tuple(measure)
    if not numbers or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ArgumentError(
            f"input_size= returned {measure!r}: return one whole number or several, e.g. "
            "lambda input_ids, **_: tuple(input_ids.shape)"
        )
    return InputSize((("input_size", len(numbers)),), numbers)
