"""The size of a batch, measured on the arguments of a forward."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from mimose.costs import InputSize
from mimose.errors import ArgumentError

SizeFunction = Callable[..., "int | Sequence[int]"]
"""A user's `input_size=`: takes the forward's arguments, returns one number or several."""


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional arguments, in order; empty if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in named)


def input_size(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str] = (),
    *,
    may_be_empty: bool = False,
) -> InputSize:
    """The size of a batch: the shapes of all tensors in a forward's arguments, at any depth.

    `names` are the forward's argument names; with them it makes no difference whether an argument
    is passed by position or by name. Tensors without dimensions are ignored. If there are no
    others, this raises unless the size `may_be_empty`.

    >>> str(input_size((torch.zeros(32, 128),), {"mask": torch.zeros(32, 128)}))
    '32×128'
    """
    layout: list[tuple[str, int]] = []
    dims: list[int] = []
    for at, value in enumerate(args):
        _collect(names[at] if at < len(names) else str(at), value, layout, dims)
    for name in names[len(args) :]:
        if name in kwargs:
            _collect(name, kwargs[name], layout, dims)
    for name in sorted(kwargs):
        if name not in names:
            _collect(name, kwargs[name], layout, dims)
    if not layout and not may_be_empty:
        raise ArgumentError(
            "the forward got no tensors, so its input has no size: pass "
            "input_size=lambda *args, **kwargs: … that returns one number or several"
        )
    return InputSize(tuple(layout), tuple(dims))


def refuse_other_arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise if the model's forward could not be called with the arguments of `explain`."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        keys = [str(key) for key in args[0]]
        if keys and all(key in signature.parameters for key in keys):
            raise ArgumentError(
                "explain got the batch as one argument, but the model's forward takes "
                f"{', '.join(keys)} by name: write explain(**batch)"
            )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"the model's forward cannot be called with these arguments ({error}): pass explain "
            "what the forward takes, for example explain(**batch)"
        ) from None


def _collect(name: str, value: Any, layout: list[tuple[str, int]], dims: list[int]) -> None:
    if isinstance(value, torch.Tensor):
        # A nested (ragged) tensor counts as its number of rows and of elements.
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


def custom_input_size(
    function: SizeFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InputSize:
    """The size of a batch, measured by the user's own function."""
    try:
        size = function(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"input_size= cannot be called with the forward's arguments ({error}): accept them "
            "all, e.g. lambda input_ids, **_: tuple(input_ids.shape)"
        ) from error
    try:
        numbers = tuple(map(operator.index, size if isinstance(size, Iterable) else (size,)))
    except TypeError:
        numbers = ()
    if not numbers or min(numbers) < 0:
        raise ArgumentError(
            f"input_size= returned {reprlib.repr(size)}: return one whole number or several, "
            "e.g. lambda input_ids, **_: tuple(input_ids.shape)"
        )
    return InputSize((("input_size", len(numbers)),), numbers)
