"""Find, copy and compare the attributes of a block's modules."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution.generators import GENERATORS

AttributeSlot = tuple[Any, str]
"""A holder (a module, or an object that a module holds) and the name of one of its attributes."""

MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""Attributes that every module has and no forward changes."""
MOST_COPIED_BYTES = 1 << 20
"""Larger values are neither copied nor compared."""
NOT_COPIED: Any = object()
"""Stands for a value that was too large to copy."""
_MOST_ITEMS = 1000
"""The items of longer containers are not copied."""
_MOST_HOLDERS = 200
"""At most this many modules and objects of a block are examined."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_LEAVES = (bool, int, float, str, type(None), torch.Tensor, tuple, type, FunctionType, ModuleType)
MOVE_PARAMETERS = frozenset({"torch", "deepspeed", "accelerate", "fairscale", "mimose"})
"""Packages that gather or move parameters in hooks; a recompute needs these hooks."""
_SKIPPED_PACKAGES = MOVE_PARAMETERS | {"builtins", "logging", "threading", "weakref"}
"""Packages whose objects change during a forward for reasons unrelated to the block."""
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.", "fairscale.")
"""Modules whose wrappers (FSDP1, ZeRO) replace parameters during a forward."""


def attribute_holders(block: nn.Module) -> list[Any]:
    """A block's modules, and the objects in their attributes, also those in containers."""
    modules = list(block.modules())
    if any(type(module).__module__.startswith(_WRAPPERS) for module in modules):
        return []
    found: dict[int, Any] = {id(module): module for module in modules}
    for module in modules:
        _add_held_objects(vars(module), found, depth=1)
    return list(found.values())


def _add_held_objects(attributes: dict[str, Any], found: dict[int, Any], depth: int) -> None:
    for name, value in attributes.items():
        if name in MODULE_INTERNALS or isinstance(value, _LEAVES):
            continue
        for item in _items(value):
            if _is_holder(item) and id(item) not in found and len(found) < _MOST_HOLDERS:
                found[id(item)] = item
                if depth:
                    _add_held_objects(vars(item), found, depth - 1)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return list(items) if len(value) <= _MOST_ITEMS else ()
    return (value,)


def _is_holder(value: Any) -> bool:
    """Whether a value is an object of a user's class, with its attributes in a `__dict__`."""
    if isinstance(value, (*_LEAVES, nn.Module, *_CONTAINERS, *GENERATORS, np.ndarray)):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _SKIPPED_PACKAGES and isinstance(getattr(value, "__dict__", None), dict)


def attribute_changed(now: Any, before: Any, copy: Any) -> bool:
    """Whether an attribute's value differs from `before`; `copy` is an earlier copy of `before`."""
    if now is before:
        return not equals_copy(now, copy)
    plain = isinstance(now, (bool, int, float, str)) and type(now) is type(before)
    return not (plain and now == before)


def equals_copy(now: Any, copy: Any) -> bool:
    """Whether a value is still equal to its earlier copy."""
    if now is copy:
        return True
    if type(now) is not type(copy):
        return False
    if isinstance(now, torch.Tensor):
        return now.shape == copy.shape and now.dtype == copy.dtype and torch.equal(now, copy)
    if isinstance(now, np.ndarray):
        return np.array_equal(now, copy)
    if isinstance(now, dict):
        return now.keys() == copy.keys() and all(equals_copy(v, copy[k]) for k, v in now.items())
    if isinstance(now, set):
        return len(now) == len(copy) and all(a is b for a, b in zip(now, copy, strict=True))
    if isinstance(now, (list, deque)):
        return len(now) == len(copy) and all(map(equals_copy, now, copy))
    return False


def copy_value(value: Any, *, graph: bool = True, tensors: bool = True, depth: int = 3) -> Any:
    """Copy what a forward may change in place: containers with their items, and small tensors.

    A tensor that requires grad is not copied. With `graph=False` it is detached, but still
    requires grad, so that operations on it record a graph as in the forward; NOT_COPIED replaces
    a large one.
    """
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, graph) if tensors or value.requires_grad else value
    kind = type(value)
    if kind is np.ndarray:
        return value.copy() if value.nbytes <= MOST_COPIED_BYTES else value
    if kind not in _CONTAINERS:
        return value
    made = value.copy()
    if kind is set or not depth or len(value) > _MOST_ITEMS:
        return made
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        made[key] = copy_value(item, graph=graph, tensors=tensors, depth=depth - 1)
    return made


def _copy_tensor(tensor: torch.Tensor, graph: bool) -> Any:
    if not tensor.requires_grad:
        return tensor.clone() if is_small_and_plain(tensor) else tensor
    if graph or isinstance(tensor, nn.Parameter):
        return tensor
    small = tensor.nbytes <= MOST_COPIED_BYTES
    return tensor.detach().requires_grad_() if small else NOT_COPIED


def is_small_and_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small and neither sparse, nested nor otherwise special."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    special = tensor.is_nested or tensor.is_meta or tensor.is_inference()
    return plain and not special and tensor.nbytes <= MOST_COPIED_BYTES
