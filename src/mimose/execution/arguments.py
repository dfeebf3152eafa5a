"""Objects among a block's arguments: a graph's data, a deque of skips, a collector of losses.

A block may change such an object, and so may later code. A recompute needs the state that its
forward started from, and must not change the object a second time. So it runs on copies taken
before the forward. The copies share their tensors with the originals. A block is kept if its
forward changes the originals, or if an argument cannot be copied.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import io
import logging
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution.caches import copy_cache, is_cache
from mimose.execution.closures import values_held_by
from mimose.execution.generators import GENERATORS
from mimose.execution.object_contents import (
    COPIED_BYTES,
    VALUE_TYPES,
    contents_of,
    same_content,
    slots_of,
)
from mimose.tensors import shape_of, version_of

_MOST_OBJECTS = 1000
"""A block whose arguments refer to more objects is kept: copying them would take too long."""
_MOST_DEPTH = 40
_PLAIN = VALUE_TYPES | {torch.Tensor, nn.Parameter}
_IMMUTABLE = (
    *(type, range, slice, frozenset, enum.Enum, np.generic, logging.Logger, weakref.ref),
    *(types.ModuleType, types.CodeType, types.MappingProxyType),
    *(torch.layout, torch.memory_format),
)
_CALLABLES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)


def are_plain(args: Any, kwargs: Any) -> bool:
    """Whether arguments are only tensors and plain values, in tuples, lists and dicts, or caches.

    `SavedArguments` copies the containers and caches for each recompute.
    """
    return _all_plain(args) and (not kwargs or _all_plain(kwargs.values()))


def _all_plain(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is tuple or kind is list:
            if not _all_plain(value):
                return False
        elif kind is dict:
            if not _all_plain(value.values()):
                return False
        elif not isinstance(value, torch.Tensor) and not is_cache(kind):
            return False
    return True


class _CannotCopy(Exception):
    """An argument refers to something that cannot be copied."""


class ArgumentCopies:
    """Copies of a call's arguments, taken before its forward."""

    __slots__ = ("__weakref__", "_contents", "_copies", "_tensors", "args", "kwargs", "problem")

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.problem: str | None = None
        """Why these arguments cannot be copied; None if they were."""
        self._contents: list[tuple[Any, list[Any]]] = []
        """Each original with its contents before the forward."""
        self._copies: dict[int, Any] = {}
        """The copy of each original, by the id of the original."""
        self._tensors: list[tuple[torch.Tensor, int]] = []
        try:
            self.args = tuple([self._copy_argument(value) for value in args])
            self.kwargs = {name: self._copy_argument(value) for name, value in kwargs.items()}
        except _CannotCopy as problem:
            self.problem = str(problem)
        except Exception as error:  # raised by a class's own copying
            self.problem = f"its arguments cannot be copied ({type(error).__name__}: {error})"
        if self.problem is not None:
            self._contents, self._copies, self._tensors = [], {}, []

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> ArgumentCopies | None:
        """Copies of arguments; None if they are plain."""
        return None if are_plain(args, kwargs) else cls(args, kwargs)

    def changed(self) -> str | None:
        """Describes what the forward has changed; None if nothing. Releases the originals."""
        contents, self._contents, self._copies = self._contents, [], {}
        for original, before in contents:
            now = contents_of(original)
            if len(now) != len(before) or not all(map(same_content, now, before)):
                return _describe(original)
        return "a tensor in one" if self.tensors_changed else None

    @property
    def tensors_changed(self) -> bool:
        """Whether a tensor in these objects was changed in place since."""
        return any(version_of(tensor) != version for tensor, version in self._tensors)

    def stands_for(self, value: Any, copied: Any) -> bool:
        """Whether `copied` is the copy of an object that `changed` looks at."""
        return id(value) in self._copies and self._copies[id(value)] is copied

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function`, or raise if a tensor in these objects was changed in place."""
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor {list(shape_of(tensor))} in an argument of a "
                    "recomputed block. Work on a copy of it, or exclude this block"
                )
        return function(*args)

    def _copy_argument(self, value: Any) -> Any:
        """Copy an argument.

        A block may change containers, dataclasses and caches that are arguments themselves,
        because every recompute gets its own copies of these. So their contents are not recorded.
        """
        kind = type(value)
        if is_cache(kind):
            return copy_cache(value)
        if kind is tuple or kind is list:
            return kind([self._copy_argument(item) for item in value])
        if kind is dict:
            return {key: self._copy_argument(item) for key, item in value.items()}
        if isinstance(value, MutableMapping):
            return self._copy_items(copy.copy(value), value.items(), depth=0)
        if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            return self._copy_object(value, depth=1)
        return self._copy(value)

    def _copy(self, value: Any, depth: int = 0) -> Any:
        """A copy of anything that can change. Tensors and immutable values are not copied."""
        if type(value) is weakref.ref and id(value()) in self._copies:
            return weakref.ref(self._copies[id(value())])
        if type(value) in VALUE_TYPES or isinstance(value, _IMMUTABLE):
            return value
        if isinstance(value, torch.Tensor):
            self._tensors.append((value, version_of(value)))
            return value
        if depth and isinstance(value, nn.Module):  # a block is not expected to change it
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if depth > _MOST_DEPTH or len(self._copies) >= _MOST_OBJECTS:
            raise _CannotCopy(f"its arguments refer to more than {_MOST_OBJECTS} objects")
        if isinstance(value, tuple):
            return self._copy_tuple(value, depth + 1)
        self._contents.append((value, contents_of(value)))
        return self._copy_mutable(value, depth + 1)

    def _copy_tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        items = [self._copy(item, depth) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return tuple.__new__(type(value), items)

    def _copy_mutable(self, value: Any, depth: int) -> Any:
        if isinstance(value, (list, dict, set, deque)):
            return self._copy_container(value, depth)
        if isinstance(value, np.ndarray):
            return self._remember(value, value.copy() if value.nbytes <= COPIED_BYTES else value)
        if isinstance(value, bytearray):
            return self._remember(value, value.copy())
        if isinstance(value, (nn.Module, *GENERATORS)):
            return self._remember(value, value)
        if isinstance(value, _CALLABLES):
            return self._copy_callable(value, depth)
        if isinstance(value, io.IOBase):
            raise _CannotCopy(
                f"one of its arguments is {_describe(value)}, which cannot be read or written twice"
            )
        if hasattr(value, "__dict__") or any(slots_of(value)):
            return self._copy_object(value, depth)
        if hasattr(value, "__next__"):
            raise _CannotCopy(
                f"one of its arguments is {_describe(value)}, which cannot be iterated twice"
            )
        return self._remember(value, value)

    def _remember(self, value: Any, made: Any) -> Any:
        self._copies[id(value)] = made
        return made

    def _copy_container(self, value: Any, depth: int) -> Any:
        made = self._remember(value, copy.copy(value))
        if isinstance(value, set):
            return made
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return self._copy_items(made, items, depth)

    def _copy_items(self, made: Any, items: Iterable[tuple[Any, Any]], depth: int) -> Any:
        for key, item in list(items):
            item_copy = self._copy(item, depth)
            if item_copy is not item:
                made[key] = item_copy
        return made

    def _copy_callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, functools.partial):
            func, args = self._copy(value.func, depth), self._copy(value.args, depth)
            return functools.partial(func, *args, **self._copy(value.keywords, depth))
        if not isinstance(value, types.FunctionType):  # a method, or a list's append
            owner = self._copy(value.__self__, depth)
            if owner is value.__self__:
                return value
            if isinstance(value, types.MethodType):
                return types.MethodType(value.__func__, owner)
            return getattr(owner, value.__name__)
        self._remember(value, value)
        for inner in values_held_by(value):
            if self._copy(inner, depth) is not inner:
                raise _CannotCopy(
                    f"one of its arguments is the function {value.__qualname__!r}, which holds "
                    f"{_describe(inner)} that can change"
                )
        return value

    def _copy_object(self, value: Any, depth: int) -> Any:
        """An object of the same class with copies of the attributes."""
        made = self._remember(value, _new_instance(value))
        if made is value:
            return value
        for name in slots_of(value):
            object.__setattr__(made, name, self._copy(getattr(value, name), depth))
        if hasattr(value, "__dict__"):
            held = {name: self._copy(item, depth) for name, item in vars(value).items()}
            made.__dict__.update(held)
        return made


def _new_instance(value: Any) -> Any:
    """A new object of the class, without `__init__`; `value` itself if that is impossible."""
    try:
        return object.__new__(type(value))
    except TypeError:  # a class implemented in C
        with contextlib.suppress(Exception):
            return copy.copy(value)
        return value


def _describe(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
