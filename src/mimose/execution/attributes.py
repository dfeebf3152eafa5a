"""Find, copy and compare the attributes of a block's modules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution.generators import GENERATORS
from mimose.tensors import equal_values

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
"""At most this many objects in the attributes of a block's modules are examined."""
_CONTAINERS = (list, dict, set, deque)
_LEAVES = (bool, int, float, str, type(None), torch.Tensor, type, FunctionType, ModuleType)
_WITH_ITEMS = (*_CONTAINERS, tuple)
_IMMUTABLE = frozenset({bool, int, float, str, type(None)})
MOVE_PARAMETERS = frozenset({"torch", "deepspeed", "accelerate", "fairscale", "mimose"})
"""Packages that gather or move parameters in hooks; a recompute needs these hooks."""
_SKIPPED_PACKAGES = MOVE_PARAMETERS | {"builtins", "logging", "threading", "weakref"}
"""Packages whose objects change during a forward for reasons unrelated to the block."""
_WRAPPERS = (
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.nn.parallel.",
    "deepspeed.",
    "fairscale.",
)
"""Modules whose wrappers (FSDP1, ZeRO) replace parameters during a forward."""


def attribute_holders(block: nn.Module) -> list[Any]:
    """A block's modules, and the objects in their attributes, also those in containers."""
    modules = list(block.modules())
    if any(type(module).__module__.startswith(_WRAPPERS) for module in modules):
        return []
    found: dict[int, Any] = {}
    for module in modules:
        _add_held_objects(vars(module), found, depth=1)
    return [*modules, *found.values()]


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
    if isinstance(value, _WITH_ITEMS):
        items = value.values() if isinstance(value, dict) else value
        return list(items) if len(value) <= _MOST_ITEMS else ()
    return (value,)


def _is_holder(value: Any) -> bool:
    """Whether a value is an object of a user's class, with its attributes in a `__dict__`."""
    if isinstance(value, (*_LEAVES, nn.Module, *_WITH_ITEMS, *GENERATORS, np.ndarray)):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _SKIPPED_PACKAGES and isinstance(getattr(value, "__dict__", None), dict)


def attribute_changed(now: Any, before: Any, copied: Any) -> bool:
    """Whether an attribute's value differs from `before`, of which `copied` is an earlier copy."""
    if now is before:
        return not equals_copy(now, copied)
    plain = isinstance(now, (bool, int, float, str)) and type(now) is type(before)
    return not (plain and now == before)


def equals_copy(now: Any, copied: Any) -> bool:
    """Whether a value is still equal to its earlier copy."""
    if now is copied:
        return True
    if type(now) is not type(copied):
        return False
    if isinstance(now, torch.Tensor):
        return equal_values(now, copied)
    if isinstance(now, np.ndarray):
        return np.array_equal(now, copied)
    if isinstance(now, dict):
        return now.keys() == copied.keys() and all(
            equals_copy(v, copied[k]) for k, v in now.items()
        )
    if isinstance(now, set):
        return len(now) == len(copied) and all(a is b for a, b in zip(now, copied, strict=True))
    if isinstance(now, (list, deque, tuple)):
        return len(now) == len(copied) and all(map(equals_copy, now, copied))
    return False


def copy_value(value: Any, *, graph: bool = True, tensors: bool = True, depth: int = 3) -> Any:
    """Copy what a forward may change in place: containers with their items, and small tensors.

    A tensor that requires grad is not copied. With `graph=False` it is detached, but still
    requires grad, so that operations on it record a graph as in the forward; NOT_COPIED replaces
    a large one.
    """
    if type(value) in _IMMUTABLE:  # most values
        return value
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, graph) if tensors or value.requires_grad else value
    if type(value) is np.ndarray:
        return value.copy() if value.nbytes <= MOST_COPIED_BYTES else value
    if not isinstance(value, _WITH_ITEMS):
        return value

    def copy_item(item: Any) -> Any:
        return copy_value(item, graph=graph, tensors=tensors, depth=depth - 1)

    if isinstance(value, tuple):
        return _copy_tuple(value, copy_item) if depth else value
    try:
        return _copy_container(value, copy_item if depth else None)
    except Exception:  # a subclass whose copying or item assignment has conditions
        return value


def _copy_container(value: Any, copy_item: Callable[[Any], Any] | None) -> Any:
    made = copy.copy(value)
    if copy_item is None or isinstance(value, set) or len(value) > _MOST_ITEMS:
        return made
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        made[key] = copy_item(item)
    return made


def _copy_tuple(value: tuple[Any, ...], copy_item: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The tuple itself, unless it holds something that can change."""
    items = [copy_item(item) for item in value]
    if all(made is item for made, item in zip(items, value, strict=True)):
        return value
    return tuple.__new__(type(value), items)


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
