"""Buffers that a forward changes: BatchNorm's statistics, spectral norm's vectors.

A recompute must start from the values that the forward saw, and must not update them a second
time. Tensor versions do not show such changes (native batch norm does not count its updates), and
writing old values back in place would break other graphs. So the recompute runs on copies that are
swapped into `module._buffers`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mimose.execution.closures import values_held_by
from mimose.execution.temporary_values import ABSENT, put, run_with
from mimose.tensors import bytes_of, equal_values

BufferSlot = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""

_ALWAYS_COPIED_BYTES = 1 << 20
"""Any buffer up to this size may change. A larger one counts as constant, unless it is a norm's."""


class BufferSnapshot:
    """Copies of some buffers at one moment; None for a buffer without a value yet."""

    __slots__ = ("values",)

    def __init__(self, slots: Iterable[BufferSlot]) -> None:
        self.values = [
            (module, name, _copy(module._buffers[name]))
            for module, name in slots
            if name in module._buffers
        ]

    @classmethod
    def of(cls, values: list[tuple[nn.Module, str, Any]]) -> BufferSnapshot:
        """A snapshot of these values: module, name, value."""
        made = cls(())
        made.values = values
        return made

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` on copies of these values, then restore the present buffers."""
        copies = [(module._buffers, name, _copy(value)) for module, name, value in self.values]
        return run_with(copies, function, *args)

    def restore(self) -> None:
        """Write these values into the present buffers, without autograd noticing."""
        for module, name, value in self.values:
            now = module._buffers.get(name)
            if now is None or not isinstance(value, torch.Tensor):
                put(module._buffers, name, _copy(value))
            else:
                now.data.copy_(value)

    def changed(self) -> list[BufferSlot]:
        """The buffers that no longer have the values of the snapshot."""
        return [
            (module, name)
            for module, name, value in self.values
            if not _equal(module._buffers.get(name), value)
        ]

    def add_new_buffers(self, module: nn.Module) -> None:
        """Record that buffers which `module` has now were absent when the snapshot was taken."""
        known = {(id(owner), name) for owner, name, _ in self.values}
        for owner, name in buffers_in(module):
            if (id(owner), name) not in known:
                self.values.append((owner, name, ABSENT))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b
    return equal_values(a, b)


def buffers_in(module: nn.Module) -> list[BufferSlot]:
    """Every buffer in `module` that has a value."""
    return [(m, name) for m, name in all_buffer_slots(module) if m._buffers[name] is not None]


def all_buffer_slots(module: nn.Module) -> list[BufferSlot]:
    """Every buffer in `module`, also those that are None."""
    return [(m, name) for m in module.modules() for name, _ in m._buffers.items()]


def norm_buffers(module: nn.Module) -> list[BufferSlot]:
    """The statistics of normalization layers: they change in every training forward."""
    return [slot for slot in buffers_in(module) if is_norm(slot[0])]


def buffers_a_call_may_change(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> list[BufferSlot]:
    """The buffers that a call may change, in the modules that its function and arguments reach."""
    modules = {id(m): m for m in _modules_reached_by((function, args, kwargs), depth=4)}
    slots = {
        (id(owner), name): (owner, name)
        for module in modules.values()
        for owner, name in buffers_in(module)
        if may_change(owner, owner._buffers[name])
    }
    return list(slots.values())


def may_change(module: nn.Module, buffer: torch.Tensor | None) -> bool:
    """Whether a forward may change a module's buffer: a norm's, or any small one."""
    return buffer is not None and (is_norm(module) or bytes_of([buffer]) <= _ALWAYS_COPIED_BYTES)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _modules_reached_by(value: Any, depth: int) -> Iterator[nn.Module]:
    """The modules that a value refers to over at most `depth` references."""
    if isinstance(value, nn.Module):
        yield value
    elif depth and not isinstance(value, torch.Tensor):
        for inner in _references(value):
            yield from _modules_reached_by(inner, depth - 1)


def _references(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list, set)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_names
        used_globals = (value.__globals__.get(name) for name in names)
        modules = (g for g in used_globals if isinstance(g, nn.Module))
        return (*values_held_by(value), *modules)
    return ()
