"""The structure of a block: whether modules, hooks or buffers were added, removed or replaced."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn


class ModuleStructure:
    """The modules of a block, with their hooks and the names of their buffers."""

    __slots__ = ("_children", "_empty", "_parts", "_seen", "_tables")

    def __init__(self, block: nn.Module) -> None:
        self._parts = list(block.modules())
        tables = [table for part in self._parts for table in _tables(part, part is block)]
        self._tables = [table for table in tables if table and isinstance(table, dict)]
        self._empty = [table for table in tables if not table and isinstance(table, dict)]
        children = (part._modules for part in self._parts)
        self._children = [table for table in children if table and isinstance(table, dict)]
        self._seen = self._read()

    @property
    def unchanged(self) -> bool:
        """Whether the block still has this structure."""
        return not any(self._empty) and self._seen == self._read()

    def _read(self) -> list[Any]:
        return [
            *map(type, self._parts),
            *chain.from_iterable(self._tables),
            *chain.from_iterable(map(dict.values, self._children)),
        ]


def _tables(part: nn.Module, is_block: bool) -> tuple[Any, ...]:
    if is_block:  # the block's own hooks run outside the recompute
        return part._modules, part._buffers
    return part._modules, part._buffers, part._forward_hooks, part._forward_pre_hooks
