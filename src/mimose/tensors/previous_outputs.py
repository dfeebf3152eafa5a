"""Memory of the last step's outputs, which often live until the next forward has returned."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from mimose.tensors.nested import storage_of


class PreviousOutputs:
    """The last step's outputs that are still alive when the next forward starts.

    A loop's `out = model(...)` holds the old output until the new one is assigned. The old output
    takes memory in the forward and is freed before the backward.
    """

    def __init__(self) -> None:
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._are_freed = True

    def remember(self, outputs: Iterable[torch.Tensor]) -> None:
        """Remember what the model has returned."""
        self._outputs = [weakref.ref(tensor) for tensor in outputs]

    def start_forward(self, device: torch.device) -> int:
        """Note which outputs of the last step are alive on this device.

        Returns the bytes that will be freed before the backward, judging by the last observed step.
        """
        alive = [tensor for ref in self._outputs if (tensor := ref()) is not None]
        storages = {
            storage._cdata: (weakref.ref(tensor), storage.nbytes())
            for tensor in alive
            if tensor.device == device and (storage := storage_of(tensor)) is not None
        }
        self._alive = list(storages.values())
        return sum([size for _, size in self._alive]) if self._alive and self._are_freed else 0

    def freed_bytes(self) -> int:
        """The bytes of previous outputs freed since the forward started."""
        freed = sum(size for ref, size in self._alive if ref() is None)
        if any(size for _, size in self._alive):
            self._are_freed = freed > 0
        return freed
