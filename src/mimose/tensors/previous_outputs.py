"""The last step's outputs: alive while the next forward runs, gone in its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from mimose.tensors.nested import storage_of


class PreviousOutputs:
    """The last step's outputs that are still alive when the next forward starts.

    A loop's `out = model(...)` holds the old output until the new one is there: it burdens the
    forward and is gone in the backward.
    """

    def __init__(self) -> None:
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._die = True

    def outputs_are(self, tensors: Iterable[torch.Tensor]) -> None:
        """The model has returned these."""
        self._outputs = [weakref.ref(tensor) for tensor in tensors]

    def step_starts(self, device: torch.device) -> None:
        """A forward starts: whatever of them is alive now, on this device, is stale."""
        alive = [tensor for ref in self._outputs if (tensor := ref()) is not None]
        storages = {
            storage._cdata: (weakref.ref(tensor), storage.nbytes())
            for tensor in alive
            if tensor.device == device and (storage := storage_of(tensor)) is not None
        }
        self._alive = list(storages.values())

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
