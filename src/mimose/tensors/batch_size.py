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
"""A user's own measure: of the forward's arguments, one number or several."""


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
