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


class Snapshot:
    """The values of some buffers at one moment."""

    __slots__ = ("values",)

    def __init__(self, places: Iterable[Place]) -> None:
        self.values = [
            (module, name, value.clone())
            for module, name in places
            if (value := module._buffers.get(name)) is not None
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with copies of these values in place of the present buffers."""
        present = [(module, name, module._buffers[name]) for module, name, _ in self.values]
        try:
            for module, name, value in self.values:
                module._buffers[name] = value.clone()
            return function(*args)
        finally:
            for module, name, buffer in present:
                module._buffers[name] = buffer

    def put_back(self) -> None:
        """The present buffers hold these values again; no graph takes notice."""
        for module, name, value in self.values:
            module._buffers[name].data.copy_(value)  # type: ignore[union-attr]

    def changed(self) -> list[Place]:
        """The places whose values are no longer those of the snapshot."""
        return [
            (module, name)
            for module, name, value in self.values
            if (now := module._buffers[name]) is None or not _same(now, value)
        ]


def places_in(module: nn.Module) -> list[Place]:
    """Every buffer in `module`."""
    return [(m, name) for m in module.modules() for name, b in m._buffers.items() if b is not None]


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


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
