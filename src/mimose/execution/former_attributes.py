"""Put attributes back for good, because a forward that failed is run again with its whole step.

Unlike `AttributeSnapshot`, whose values are swapped in during a recompute, this restores the
objects themselves: a list that other code holds, too, gets its former items.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from mimose.execution.attributes import (
    MODULE_INTERNALS,
    NOT_COPIED,
    AttributeSlot,
    attribute_holders,
    copy_value,
)
from mimose.execution.generators import GENERATORS
from mimose.execution.side_effects import SideEffects
from mimose.execution.temporary_values import ABSENT, put
from mimose.execution.undo import refill
from mimose.tensors import version_of


class _Former(NamedTuple):
    """An attribute's value: whether a value is that very object, and a copy of its contents."""

    holder: Any
    name: str
    is_same: Callable[[Any], bool]
    copy: Any


class FormerAttributes:
    """Attributes at one moment, which `restore` puts back."""

    def __init__(self, slots: Iterable[AttributeSlot]) -> None:
        self._values = []
        self._uncopied = []
        for holder, name in slots:
            value = vars(holder).get(name, ABSENT)
            copy = copy_value(value, graph=False)
            self._values.append(_Former(holder, name, _test_for(value), copy))
            if isinstance(value, torch.Tensor) and value is copy:
                self._uncopied.append((value, version_of(value)))

    @property
    def overwritten(self) -> torch.Tensor | None:
        """A tensor that was too large to copy and has been changed in place since."""
        return next((t for t, version in self._uncopied if version_of(t) != version), None)

    def restore(self) -> None:
        """Put the values back. What carries a graph and is too large to copy stays as it is."""
        for holder, name, is_same, copy in self._values:
            now = vars(holder).get(name, ABSENT)
            if copy is not NOT_COPIED and not (is_same(now) and refill(now, copy)):
                put(vars(holder), name, copy_value(copy))


def _test_for(value: Any) -> Callable[[Any], bool]:
    """A test for this very object, which does not keep a tensor or a list of tensors alive."""
    if isinstance(value, torch.Tensor):
        ref = weakref.ref(value)
        return lambda now: now is ref()
    number = id(value)
    return lambda now: id(now) == number


class AllAttributes:
    """All attributes of a block's modules, if it is unknown which of them its forward changes."""

    def __init__(self, block: nn.Module) -> None:
        holders = attribute_holders(block)
        self._names = [(h, frozenset(vars(h))) for h in holders if isinstance(h, nn.Module)]

    def side_effects(self) -> SideEffects:
        """As if its forward changed all of them, and drew from all generators among them."""
        slots = [(h, n) for h, names in self._names for n in names - MODULE_INTERNALS]
        values = (vars(holder)[name] for holder, name in slots)
        generators = tuple({id(v): v for v in values if isinstance(v, GENERATORS)}.values())
        return SideEffects(tuple(slots), draws=bool(generators), generators=generators)

    def remove_new(self) -> None:
        """Remove the attributes that were added since."""
        for holder, names in self._names:
            for name in vars(holder).keys() - names - MODULE_INTERNALS:
                del vars(holder)[name]
