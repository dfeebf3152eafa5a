"""Blocks of one make: what one of them has shown in its first run need not be tried on the rest."""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from mimose.execution import is_norm

_PLAIN = (bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, type)
_OWN = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
_FEW = 16
"""Containers of up to this many plain values are compared by these."""
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index"})
"""Attributes in which a block stores its position among its siblings."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Same:
    """Equal to the very same object alone."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def kind_of(block: nn.Module) -> Hashable | None:
    """What a block is made of: equal for blocks that do the same with the same kind of input.

    Everything but its weights and its number has to be equal, or the same object. None if that
    cannot be told: hooks inside it, a forward of its own, tensors in its attributes.
    """
    parts = list(block.named_modules())
    for name, part in parts:
        if "forward" in vars(part) or (name and any(getattr(part, hooks) for hooks in _HOOKS)):
            return None
        if any(buffer is not None for buffer in part._buffers.values()) and not is_norm(part):
            return None
    if any(isinstance(value, torch.Tensor) for _, part in parts for value in vars(part).values()):
        return None
    return tuple((name, type(part), _weights(part), _attributes(part)) for name, part in parts)


def _weights(part: nn.Module) -> Hashable:
    return tuple(
        (name, None if weight is None else (weight.shape, weight.dtype, weight.requires_grad))
        for name, weight in part._parameters.items()
    )


def _attributes(part: nn.Module) -> Hashable:
    return tuple(
        (name, _comparable(value, part))
        for name, value in vars(part).items()
        if name not in _OWN and not (name in _NUMBERS and type(value) is int)
    )


def _comparable(value: Any, part: nn.Module) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (tuple, list, set, dict) and len(value) <= _FEW:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        plain = (item for pair in items for item in (pair if isinstance(value, dict) else [pair]))
        if all(isinstance(item, _PLAIN) for item in plain):
            return type(value), frozenset(items) if isinstance(value, set) else tuple(items)
    if isinstance(value, types.MethodType) and value.__self__ is part:
        return _Same(value.__func__)
    return _Same(value)
