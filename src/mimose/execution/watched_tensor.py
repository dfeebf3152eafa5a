"""Detect that a forward changes or replaces a tensor in an attribute or buffer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mimose.execution.attributes import is_small_and_plain
from mimose.execution.temporary_values import ABSENT
from mimose.tensors import version_of

_COPIED_BYTES = 1 << 16
"""Tensors up to this size are copied, so that their value before an in-place change is known."""


class WatchedTensor:
    """A slot with a tensor. Records the tensor's version and, if it is small, its value."""

    __slots__ = ("_copy", "_ref", "_table", "_version", "holder", "name")

    def __init__(self, holder: Any, table: dict[str, Any], name: str) -> None:
        self.holder, self._table, self.name = holder, table, name
        self._ref: Callable[[], Any] = _no_tensor
        self._version = -2
        self._copy: torch.Tensor | None = None
        self.record()

    @property
    def is_buffer(self) -> bool:
        return self._table is not vars(self.holder)

    def record(self) -> torch.Tensor | None:
        """Record and return the tensor now in the slot; None if there is none."""
        found = self._table.get(self.name)
        if not isinstance(found, torch.Tensor):
            return None
        if self._ref() is not found or version_of(found) != self._version:
            self._ref, self._version = weakref.ref(found), version_of(found)
            small = is_small_and_plain(found) and found.nbytes <= _COPIED_BYTES
            self._copy = found.clone() if small and not found.requires_grad else None
        return found

    def changed_since(self, before: torch.Tensor | None) -> bool:
        """Whether the recorded tensor was replaced or changed in place."""
        now = self._table.get(self.name)
        if now is not before:
            return before is not None or isinstance(now, torch.Tensor)
        return before is not None and version_of(before) != self._version

    def value_before(self, before: torch.Tensor | None) -> Any:
        """The value that was recorded; ABSENT if it was changed in place and not copied."""
        if before is None or version_of(before) == self._version:
            return before
        return ABSENT if self._copy is None else self._copy


def _no_tensor() -> None:
    return None
