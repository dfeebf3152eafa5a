"""What a block becomes, or begins to change, after it was tried.

Its modules are exchanged, hooks are added, a switch makes it count its calls or move a buffer. This
is looked for around each forward that will be recomputed, and so must take microseconds: the very
same objects in the same places are enough. Old values of what a forward has changed are at hand, so
that its recompute finds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution.buffers import Place as Buffer
from mimose.execution.side_effects import (
    ABSENT,
    OWN,
    Place,
    can_be_compared,
    copied,
    differs,
    holders,
    like,
)

_COPIED_BYTES = 1 << 16
"""Up to this size the value of a tensor is at hand after a change in place."""
_MOST_ATTRIBUTES = 32
"""Objects with more, such as a model's configuration, are looked at in the first run alone."""
_MUTABLE = (list, dict, set, np.ndarray)


class Build:
    """The modules of a block, with their hooks and the names of their buffers."""

    __slots__ = ("_children", "_parts", "_seen", "_tables")

    def __init__(self, block: nn.Module) -> None:
        self._parts = list(block.modules())
        tables = [table for part in self._parts for table in _tables(part, part is block)]
        self._tables = [table for table in tables if isinstance(table, dict)]
        children = (part._modules for part in self._parts)
        self._children = [names for names in children if names and isinstance(names, dict)]
        self._seen = self._read()

    @property
    def unchanged(self) -> bool:
        """Whether the block is made as it was."""
        return self._seen == self._read()

    def _read(self) -> list[Any]:
        return [
            *map(type, self._parts),
            *chain.from_iterable(self._tables),
            *chain.from_iterable(map(dict.values, self._children)),
        ]


def _tables(part: nn.Module, is_block: bool) -> tuple[Any, ...]:
    """A block's own hooks run outside of what is recomputed."""
    if is_block:
        return part._modules, part._buffers
    return part._modules, part._buffers, part._forward_hooks, part._forward_pre_hooks


def _sets_nothing(holder: Any) -> bool:
    """Whether it is one of torch's own layers, whose forwards set no attributes."""
    hooked = isinstance(holder, nn.Module) and (holder._forward_hooks or holder._forward_pre_hooks)
    return type(holder).__module__.startswith("torch.nn.modules.") and not hooked


@dataclass(frozen=True, slots=True)
class Begun:
    """What a forward has changed that no forward of the block had changed before."""

    attributes: list[tuple[Any, str, Any]]
    """Holder, name, and the value before."""
    buffers: list[tuple[nn.Module, str, Any]]
    lost: str
    """The name of one whose value before is not at hand: a large tensor was changed in place."""

    @property
    def places(self) -> tuple[list[Buffer], tuple[Place, ...]]:
        return (
            [(module, name) for module, name, _ in self.buffers],
            tuple((holder, name) for holder, name, _ in self.attributes),
        )


class Later:
    """Looks at what a block has left alone so far: `before` a forward, then `Moment.begun`."""

    __slots__ = ("dicts", "getters", "mutable", "names", "parts", "sizes", "tensors")

    def __init__(self, block: nn.Module, known: Iterable[Place], buffers: Iterable[Buffer]) -> None:
        self.parts: list[Any] = []
        self.names: list[list[str]] = []
        self.getters: list[Callable[[Any], Any]] = []
        self.mutable: list[Place] = []
        self.tensors = [_Tensor(module, module._buffers, name) for module, name in buffers]
        apart = {(id(holder), name) for holder, name in known}
        for holder in holders(block):
            if _sets_nothing(holder):
                continue
            names = [n for n in vars(holder) if n not in OWN and (id(holder), n) not in apart]
            if isinstance(holder, nn.Module) or len(names) <= _MOST_ATTRIBUTES:
                self._add(holder, names)
        self.dicts = [vars(part) for part in self.parts]
        self.sizes = list(map(len, self.dicts))

    def _add(self, holder: Any, names: list[str]) -> None:
        self.parts.append(holder)
        self.names.append(names)
        self.getters.append(itemgetter(*names) if names else len)
        for name in names:
            value = vars(holder)[name]
            if isinstance(value, torch.Tensor):
                self.tensors.append(_Tensor(holder, vars(holder), name))
            elif isinstance(value, _MUTABLE):
                self.mutable.append((holder, name))

    @property
    def current(self) -> bool:
        """Whether it knows all attributes that there are."""
        return self.sizes == list(map(len, self.dicts))

    def before(self) -> Moment:
        """What there is before a forward; KeyError if an attribute has gone."""
        return Moment(self)


class Moment:
    """The attributes and buffers that a forward finds."""

    __slots__ = ("_copies", "_later", "_tensors", "_values")

    def __init__(self, later: Later) -> None:
        self._later = later
        self._values = [get(held) for get, held in zip(later.getters, later.dicts, strict=True)]
        self._copies = [copied(vars(h)[name], tensors=False) for h, name in later.mutable]
        self._tensors = [tensor.look() for tensor in later.tensors]

    def begun(self) -> Begun | None:
        """What the forward, which is over, has changed; None if nothing."""
        later = self._later
        tensors = [
            (tensor, found)
            for tensor, found in zip(later.tensors, self._tensors, strict=True)
            if tensor.moved(found)
        ]
        attributes = [] if self._same() else self._changed()
        attributes += [
            (holder, name, copy)
            for (holder, name), copy in zip(later.mutable, self._copies, strict=True)
            if not like(vars(holder).get(name), copy)
            and not any(h is holder and n == name for h, n, _ in attributes)
        ]
        if not tensors and not attributes:
            return None
        return _begun(tensors, attributes)

    def _same(self) -> bool:
        """Whether all attributes are what they were: a glance."""
        later = self._later
        try:
            now = [get(held) for get, held in zip(later.getters, later.dicts, strict=True)]
            return later.current and bool(now == self._values)
        except Exception:  # one has gone, or is a tensor that is not compared by a glance
            return False

    def _changed(self) -> list[tuple[Any, str, Any]]:
        later, changed = self._later, []
        for holder, names, values in zip(later.parts, later.names, self._values, strict=True):
            known = values if len(names) > 1 else (values,)
            before = dict(zip(names, known, strict=False))
            for name in (*names, *(n for n in vars(holder) if n not in before and n not in OWN)):
                was = before.get(name, ABSENT)
                if isinstance(was, torch.Tensor):
                    continue
                if differs(vars(holder).get(name, ABSENT), was, was):
                    changed.append((holder, name, was))
        return changed


def _begun(
    tensors: list[tuple[_Tensor, torch.Tensor | None]], attributes: list[tuple[Any, str, Any]]
) -> Begun:
    buffers, lost = [], ""
    for tensor, found in tensors:
        value = tensor.value_before(found)
        if value is ABSENT and found is not None:
            value, lost = found.detach().clone(), tensor.name
        if tensor.is_buffer:
            buffers.append((tensor.holder, tensor.name, value))
        else:
            attributes.append((tensor.holder, tensor.name, value))
    return Begun(attributes, buffers, lost)


class _Tensor:
    """A place where a tensor is; what it held when it was last seen, if it is small."""

    __slots__ = ("_copy", "_seen", "_table", "_version", "holder", "name")

    def __init__(self, holder: Any, table: dict[str, Any], name: str) -> None:
        self.holder, self._table, self.name = holder, table, name
        self._seen: Callable[[], Any] = _nothing
        self._version = -2
        self._copy: torch.Tensor | None = None
        self.look()

    @property
    def is_buffer(self) -> bool:
        return self._table is not vars(self.holder)

    def look(self) -> torch.Tensor | None:
        """What is there now."""
        found = self._table.get(self.name)
        if not isinstance(found, torch.Tensor):
            return None
        if self._seen() is not found or _version(found) != self._version:
            self._seen, self._version = weakref.ref(found), _version(found)
            small = can_be_compared(found) and found.nbytes <= _COPIED_BYTES
            self._copy = found.clone() if small and not found.requires_grad else None
        return found

    def moved(self, found: torch.Tensor | None) -> bool:
        """Whether something else is there now, or the same thing was changed in place."""
        now = self._table.get(self.name)
        if now is not found:
            return found is not None or isinstance(now, torch.Tensor)
        return found is not None and _version(found) != self._version

    def value_before(self, found: torch.Tensor | None) -> Any:
        """What was there, unchanged; ABSENT if that is not known."""
        if found is None or _version(found) == self._version:
            return found
        return ABSENT if self._copy is None else self._copy


def _nothing() -> None:
    return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
