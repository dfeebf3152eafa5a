"""The last step's outputs: alive while the next forward runs, gone in its backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from mimose.trees import storage_of


class Stale:
    """The last step's outputs that are still alive when the next forward starts.

    A loop's `out = model(...)` holds the old output until the new one is there: it burdens the
    forward and is gone in the backward.
    """

    def __init__(self) -> None:
        self._outputs: list[tuple[Any, int]] = []
        self._alive: list[tuple[Any, int]] = []
        self._die = True

    def outputs_are(self, tensors: Sequence[torch.Tensor]) -> None:
        """The model has returned these."""
        storages = {s._cdata: (t, s.nbytes()) for t in tensors if (s := storage_of(t)) is not None}
        self._outputs = [(weakref.ref(t), size) for t, size in storages.values()]

    def step_starts(self) -> None:
        """A forward starts: whatever of them is alive now is stale."""
        self._alive = [(ref, size) for ref, size in self._outputs if ref() is not None]

    def died(self) -> int:
        """The bytes of stale outputs that are gone by now."""
        alive = sum(size for _, size in self._alive)
        gone = sum(size for ref, size in self._alive if ref() is None)
        if alive:
            self._die = gone > 0
        return gone

    def expected(self) -> int:
        """The bytes that will be gone in the backward, as far as the past tells."""
        return sum(size for _, size in self._alive) if self._die else 0
