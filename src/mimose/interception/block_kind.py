"""Recognize blocks with the same structure, so that a trial of one is valid for the others."""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from mimose.execution import is_norm

_PLAIN = (bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, type)
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
_MOST_ITEMS = 16
"""Containers up to this length are compared by their items if these are plain values. Others are
compared by identity."""
_POSITIONS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index"})
"""Attributes that store a block's position among its siblings."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _ByIdentity:
    """Wraps an object so that it is compared by identity."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def kind_of(block: nn.Module) -> Hashable | None:
    """A key for a block's structure: blocks with equal keys compute the same on the same input.

    The key covers everything except the values of the weights and the block's position. Objects
    that cannot be compared by value must be identical. None if the block has hooks inside, a
    replaced `forward`, buffers other than a norm's, or tensors in attributes.
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
        if name not in _MODULE_INTERNALS and not (name in _POSITIONS and type(value) is int)
    )


def _comparable(value: Any, part: nn.Module) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (tuple, list, set, dict) and len(value) <= _MOST_ITEMS:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        plain = (item for pair in items for item in (pair if isinstance(value, dict) else [pair]))
        if all(isinstance(item, _PLAIN) for item in plain):
            return type(value), frozenset(items) if isinstance(value, set) else tuple(items)
    if isinstance(value, types.MethodType) and value.__self__ is part:
        return _ByIdentity(value.__func__)
    return _ByIdentity(value)
