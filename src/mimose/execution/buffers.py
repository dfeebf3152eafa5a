"""Buffers that a forward changes: BatchNorm's statistics, spectral norm's vectors.

A recompute must start from what the forward saw and leave no second update behind. Tensor versions
do not tell (native batch norm does not count its updates) and writing the old values back in place
would break other graphs, so the recompute works on copies, swapped into `module._buffers`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""

_ALWAYS_COPIED_BYTES = 1 << 20
"""Up to this size a buffer of unknown habits is copied; a larger one is taken for a constant."""


_ABSENT = object()
"""Stands for a buffer that is not there."""


class Snapshot:
    """The values of some buffers at one moment; None for those that had none yet."""

    __slots__ = ("values",)

    def __init__(self, places: Iterable[Place]) -> None:
        self.values = [
            (module, name, _copy(module._buffers[name]))
            for module, name in places
            if name in module._buffers
        ]

    @classmethod
    def of(cls, values: list[tuple[nn.Module, str, Any]]) -> Snapshot:
        """These values: module, name, value."""
        made = cls(())
        made.values = values
        return made

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with copies of these values in place of the present buffers."""
        present = [(m, name, m._buffers.get(name, _ABSENT)) for m, name, _ in self.values]
        try:
            for module, name, value in self.values:
                _put(module, name, _copy(value))
            return function(*args)
        finally:
            for module, name, buffer in present:
                _put(module, name, buffer)

    def put_back(self) -> None:
        """The present buffers hold these values again; no graph takes notice."""
        for module, name, value in self.values:
            now = module._buffers.get(name)
            if now is None or not isinstance(value, torch.Tensor):
                _put(module, name, _copy(value))
            else:
                now.data.copy_(value)

    def changed(self) -> list[Place]:
        """The places whose values are no longer those of the snapshot."""
        return [
            (module, name)
            for module, name, value in self.values
            if not _same(module._buffers.get(name), value)
        ]

    def add_born(self, module: nn.Module) -> None:
        """Buffers that `module` has now, and that are not among these, were not there."""
        known = {(id(owner), name) for owner, name, _ in self.values}
        for owner, name in places_in(module):
            if (id(owner), name) not in known:
                self.values.append((owner, name, _ABSENT))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        module._buffers.pop(name, None)
    else:
        module._buffers[name] = value


def places_in(module: nn.Module) -> list[Place]:
    """Every buffer in `module`."""
    return [(m, name) for m, name in all_places_in(module) if m._buffers[name] is not None]


def all_places_in(module: nn.Module) -> list[Place]:
    """Every buffer, also those that have no value yet."""
    return [(m, name) for m in module.modules() for name, _ in m._buffers.items()]


def norm_places(module: nn.Module) -> list[Place]:
    """The statistics of normalisation layers: they change whenever the layer trains."""
    return [place for place in places_in(module) if is_norm(place[0])]


def likely_places(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Place]:
    """The buffers that a call may change, as far as the modules behind it can be told."""
    modules = {id(m): m for m in _modules_behind((function, args, kwargs), depth=4)}
    places = {
        (id(owner), name): (owner, name)
        for module in modules.values()
        for owner, name in places_in(module)
    }
    return [
        (owner, name) for owner, name in places.values() if may_change(owner, owner._buffers[name])
    ]


def may_change(module: nn.Module, buffer: torch.Tensor | None) -> bool:
    """Whether a forward may change a module's buffer: a norm's, or one too small to matter."""
    return buffer is not None and (is_norm(module) or buffer.nbytes <= _ALWAYS_COPIED_BYTES)


def _modules_behind(value: Any, depth: int) -> Iterator[nn.Module]:
    """The modules that a callable or its arguments lead to, in a few steps."""
    if isinstance(value, nn.Module):
        yield value
    elif depth and not isinstance(value, torch.Tensor):
        for inner in _led_to(value):
            yield from _modules_behind(inner, depth - 1)


def _led_to(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list, set)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _outer_values(value)
    return ()


def _outer_values(function: types.FunctionType) -> Iterator[Any]:
    """What a function's body can reach by name: its closure, defaults, and globals it mentions."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    mentioned = (function.__globals__.get(name) for name in function.__code__.co_names)
    yield from (value for value in mentioned if isinstance(value, nn.Module))


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
