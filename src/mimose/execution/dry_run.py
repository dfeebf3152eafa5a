"""Check that a recompute saves the same kinds of tensors and returns the same output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimose.tensors import shape_of, tensors_in

if TYPE_CHECKING:
    from mimose.execution.recompute import Frame


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run."""

    problem: str | None
    operators_after_last: int | None = None
    """Operators that ran after the last tensor was saved: an early stop would skip them."""


class DryRunRecorder(TorchDispatchMode):
    """Compares what a dry run saves with what the forward saved; counts operators."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kinds = frame.saved
        self.packed = 0
        self.operators_since_pack = 0
        self._saved: list[torch.Tensor] = []
        """Kept here rather than in the dry run's graph, which other code may keep alive."""

    def pack(self, tensor: torch.Tensor) -> int:
        index = self.packed
        self.packed = index + 1
        if index < len(self._kinds):
            self._kinds.compare(index, tensor)
        self._saved.append(tensor.detach())
        self.operators_since_pack = 0
        return index

    def unpack(self, index: int) -> torch.Tensor:
        """Serve a backward that runs inside the function."""
        return self._saved[index]

    def clear(self) -> None:
        """Free the saved tensors."""
        self._saved = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators_since_pack += 1
        return func(*args, **(kwargs or {}))


_TOLERANCE = 0.002
"""Tolerated difference of outputs on GPUs, relative to their norm: their summation order varies."""


def outputs_match(a: Any, b: Any) -> bool:
    """Whether two outputs are equal; on a GPU, within the tolerance."""
    ours, theirs = list(tensors_in(a)), list(tensors_in(b))
    return len(ours) == len(theirs) and all(
        shape_of(x) == shape_of(y) and x.dtype == y.dtype and _close(x, y)
        for x, y in zip(ours, theirs, strict=True)
    )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested:
        return all(map(_close, a.detach().unbind(), b.detach().unbind()))
    # Usually they are equal. On a GPU, loading each further kernel takes long.
    if a.device.type == "meta" or torch.equal(a, b):
        return True
    if a.device.type == "cpu" or not (a.is_floating_point() or a.is_complex()):
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    with torch.no_grad():
        distance, size = (a - b).norm(), a.norm()
        if size.isfinite():
            return bool(distance <= _TOLERANCE * size)
        return torch.equal(a.isfinite(), b.isfinite())
