"""Objects among a block's arguments: a graph's data, a deque of skips, a collector of losses.

A block may change what it is given, and so may whoever calls the next block. A recompute must find
what its forward found and leave no second change behind. So it works on copies of such objects,
taken before the forward, which share their tensors; and a block that changes the originals in its
forward, or that is given something which cannot be copied, is kept.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import io
import logging
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution.buffers import is_norm
from mimose.execution.caches import copy_of_cache, is_cache
from mimose.execution.generators import GENERATORS, same_state, state_of

_MOST_OBJECTS = 1000
"""A block whose arguments lead to more objects is kept: looking at them would take too long."""
_MOST_DEPTH = 40
_COPIED_BYTES = 1 << 20
"""Larger arrays are not copied: a checksum tells whether they change."""
_VALUES = frozenset(
    {int, bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_PLAIN = _VALUES | {torch.Tensor, nn.Parameter}
_UNCHANGING = (
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
    """Whether arguments are tensors and plain values alone, in tuples, lists and dicts; or caches,
    of which a recompute has its own copies anyway."""
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
    """An argument leads to something that cannot be copied."""


class Given:
    """A call's arguments as it was given them, in copies of their own."""

    __slots__ = ("__weakref__", "_looks", "_originals", "_tensors", "args", "kwargs", "problem")

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.problem: str | None = None
        """Why these arguments cannot be copied; None if they could be."""
        self._looks: list[tuple[Any, list[Any]]] = []
        self._originals: dict[int, Any] = {}
        self._tensors: list[tuple[torch.Tensor, int]] = []
        try:
            self.args = tuple([self._argument(value) for value in args])
            self.kwargs = {name: self._argument(value) for name, value in kwargs.items()}
        except _CannotCopy as problem:
            self.problem = str(problem)
        except Exception as error:  # a class with a way of its own of being copied
            self.problem = f"its arguments cannot be copied ({type(error).__name__}: {error})"
        if self.problem is not None:
            self._looks, self._originals, self._tensors = [], {}, []

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Given | None:
        """None if they are tensors and plain values alone."""
        return None if are_plain(args, kwargs) else cls(args, kwargs)

    def changed(self) -> str | None:
        """What the forward, which is over, has changed; the originals are let go of."""
        looks, self._looks, self._originals = self._looks, [], {}
        for original, before in looks:
            now = _contents(original)
            if len(now) != len(before) or not all(map(_unchanged, now, before)):
                return _title(original)
        return "a tensor in one" if self.tensors_changed else None

    @property
    def tensors_changed(self) -> bool:
        """Whether a tensor in these objects has been changed in place since."""
        return any(_version(tensor) != version for tensor, version in self._tensors)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` if the tensors in these objects are still what they were."""
        for tensor, version in self._tensors:
            if _version(tensor) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor {list(tensor.shape)} in an argument of a "
                    "recomputed block. Work on a copy of it, or exclude this block"
                )
        return function(*args)

    def _argument(self, value: Any) -> Any:
        """A copy of an argument. What is put into plain containers, records and caches is of no
        account: each recompute has its own copies of these."""
        kind = type(value)
        if is_cache(kind):
            return copy_of_cache(value)
        if kind is tuple or kind is list:
            return kind([self._argument(item) for item in value])
        if kind is dict:
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, MutableMapping):
            return self._mapping(value)
        if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            return self._twin(value, depth=1)
        return self._copied(value)

    def _mapping(self, value: MutableMapping[Any, Any]) -> Any:
        made = copy.copy(value)
        for key, item in value.items():
            own = self._copied(item)
            if own is not item:
                made[key] = own
        return made

    def _copied(self, value: Any, depth: int = 0) -> Any:
        """A copy of whatever can change; tensors and what cannot change are themselves."""
        if type(value) is weakref.ref and id(value()) in self._originals:
            return weakref.ref(self._originals[id(value())])
        if type(value) in _VALUES or isinstance(value, _UNCHANGING):
            return value
        if isinstance(value, torch.Tensor):
            self._tensors.append((value, _version(value)))
            return value
        if depth and isinstance(value, nn.Module):  # somebody's model: not the block's to change
            return value
        if id(value) in self._originals:
            return self._originals[id(value)]
        if depth > _MOST_DEPTH or len(self._originals) >= _MOST_OBJECTS:
            raise _CannotCopy(f"its arguments lead to more than {_MOST_OBJECTS} objects")
        if isinstance(value, tuple):
            return self._tuple(value, depth + 1)
        self._looks.append((value, _contents(value)))
        return self._changeable(value, depth + 1)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        items = [self._copied(item, depth) for item in value]
        if all(map(_same, items, value)):
            return value
        return tuple.__new__(type(value), items)

    def _changeable(self, value: Any, depth: int) -> Any:
        if isinstance(value, (list, dict, set, deque)):
            return self._container(value, depth)
        if isinstance(value, np.ndarray):
            return self._remember(value, value.copy() if value.nbytes <= _COPIED_BYTES else value)
        if isinstance(value, bytearray):
            return self._remember(value, value.copy())
        if isinstance(value, (nn.Module, *GENERATORS)):
            return self._remember(value, value)
        if isinstance(value, _CALLABLES):
            return self._callable(value, depth)
        if isinstance(value, io.IOBase):
            raise _CannotCopy(f"it is given {_title(value)}, which cannot be read or written twice")
        if hasattr(value, "__dict__") or any(_slots(value)):
            return self._twin(value, depth)
        if hasattr(value, "__next__"):
            raise _CannotCopy(f"it is given {_title(value)}, which cannot be run through twice")
        return self._remember(value, value)

    def _remember(self, value: Any, made: Any) -> Any:
        self._originals[id(value)] = made
        return made

    def _container(self, value: Any, depth: int) -> Any:
        made = self._remember(value, copy.copy(value))
        if isinstance(value, set):
            return made
        for at, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            own = self._copied(item, depth)
            if own is not item:
                made[at] = own
        return made

    def _callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.MethodType):
            own = self._copied(value.__self__, depth)
            return value if own is value.__self__ else types.MethodType(value.__func__, own)
        if isinstance(value, types.BuiltinFunctionType):  # a list's append, say
            own = self._copied(value.__self__, depth)
            return value if own is value.__self__ else getattr(own, value.__name__)
        if isinstance(value, functools.partial):
            parts = [self._copied(part, depth) for part in (value.func, value.args)]
            return functools.partial(parts[0], *parts[1], **self._copied(value.keywords, depth))
        self._remember(value, value)
        for inner in _cells(value):
            if self._copied(inner, depth) is not inner:
                raise _CannotCopy(
                    f"it is given the function {value.__qualname__!r}, which holds "
                    f"{_title(inner)} that can change"
                )
        return value

    def _twin(self, value: Any, depth: int) -> Any:
        """An object of the same class with copies of what the other one holds."""
        made = self._remember(value, _empty(value))
        if made is value:
            return value
        for name in _slots(value):
            object.__setattr__(made, name, self._copied(getattr(value, name), depth))
        if hasattr(value, "__dict__"):
            held = {name: self._copied(item, depth) for name, item in vars(value).items()}
            made.__dict__.update(held)
        return made


def _empty(value: Any) -> Any:
    """Another object of its class, without calling that; itself if it is made by C code alone."""
    try:
        return object.__new__(type(value))
    except TypeError:
        with contextlib.suppress(Exception):
            return copy.copy(value)
        return value


def _contents(value: Any) -> list[Any]:
    """What tells whether something was changed: the things that it holds."""
    if isinstance(value, np.ndarray):
        return [str((value.shape, value.dtype)), _imprint(value)]
    if isinstance(value, bytearray):
        return [bytes(value)]
    if isinstance(value, GENERATORS):
        return [_State(state_of(value))]
    if isinstance(value, nn.Module):
        return list(_of_module(value))
    if isinstance(value, types.FunctionType):
        return list(_cells(value))
    found: list[Any] = []
    if isinstance(value, dict):
        found = [*value.keys(), *value.values()]
    elif isinstance(value, (list, set, deque)):
        found = list(value)
    found += [getattr(value, name) for name in _slots(value)]
    held = getattr(value, "__dict__", None)
    return [*found, *held, *held.values()] if isinstance(held, dict) else found


def _of_module(module: nn.Module) -> Iterator[Any]:
    """What a forward may change on a module: attributes, buffers."""
    for part in module.modules():
        yield from vars(part).values()
        for buffer in part._buffers.values():
            yield buffer
            yield -1 if buffer is None else _version(buffer)
        if is_norm(part) and part.training and part.track_running_stats:
            yield object()  # not counted by versions: taken as changed


class _State:
    """The state of a generator of random numbers: compared by its value."""

    __slots__ = ("_state",)

    def __init__(self, state: Any) -> None:
        self._state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and same_state(self._state, other._state)

    __hash__ = None  # type: ignore[assignment]


def _imprint(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.hasobject:
        return str([id(item) for item in array.ravel()])
    data = array.tobytes()
    return data if len(data) <= _COPIED_BYTES else zlib.crc32(data)


_COMPARED = frozenset({*_VALUES, _State})


def _unchanged(now: Any, before: Any) -> bool:
    if now is before:
        return True
    return type(now) is type(before) and type(now) in _COMPARED and bool(now == before)


def _same(a: Any, b: Any) -> bool:
    return a is b


def _slots(value: Any) -> Iterator[str]:
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


def _cells(function: types.FunctionType) -> Iterator[Any]:
    """What a function holds: the values of its closure, and its defaults."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _title(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
