"""List an object's contents, to detect whether a forward changes them."""

from __future__ import annotations

import types
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution.buffers import is_norm
from mimose.execution.closures import values_held_by
from mimose.execution.generators import GENERATORS, state_bytes
from mimose.tensors import version_of

COPIED_BYTES = 1 << 20
"""Larger arrays are not copied; a checksum shows whether they change."""
VALUE_TYPES = frozenset(
    {int, bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)


def contents_of(value: Any) -> list[Any]:
    """An object's contents, to be compared before and after a forward."""
    if isinstance(value, np.ndarray):
        return [str((value.shape, value.dtype)), _array_contents(value)]
    if isinstance(value, bytearray):
        return [bytes(value)]
    if isinstance(value, GENERATORS):
        return [state_bytes(value)]
    if isinstance(value, nn.Module):
        return list(_module_contents(value))
    if isinstance(value, types.FunctionType):
        return list(values_held_by(value))
    found: list[Any] = []
    if isinstance(value, dict):
        found = [*value.keys(), *value.values()]
    elif isinstance(value, (list, set, deque)):
        found = list(value)
    found += [getattr(value, name) for name in slots_of(value)]
    held = getattr(value, "__dict__", None)
    return [*found, *held, *held.values()] if isinstance(held, dict) else found


def _module_contents(module: nn.Module) -> Iterator[Any]:
    """What a forward may change on a module: attributes and buffers."""
    for part in module.modules():
        yield from vars(part).values()
        for buffer in part._buffers.values():
            yield buffer
            yield -1 if buffer is None else version_of(buffer)
        if is_norm(part) and part.training and part.track_running_stats:
            yield object()  # native batch norm does not count versions: assume a change


def _array_contents(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.hasobject:
        return str([id(item) for item in array.ravel()])
    data = array.tobytes()
    return data if len(data) <= COPIED_BYTES else zlib.crc32(data)


def same_content(now: Any, before: Any) -> bool:
    """Whether an item of `contents_of` is the same object as before, or an equal value."""
    if now is before:
        return True
    return type(now) is type(before) and type(now) in VALUE_TYPES and bool(now == before)


def slots_of(value: Any) -> Iterator[str]:
    """The names of an object's `__slots__` that have values."""
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name
