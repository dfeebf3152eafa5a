"""A recompute that is only tried: does it save what the forward saved, and give what it gave?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimose.tensors import tensors_in

if TYPE_CHECKING:
    from mimose.execution.recompute import Frame


@dataclass(frozen=True, slots=True)
class DryRun:
    """How a recompute went that was only tried."""

    problem: str | None
    operators_after_last: int | None = None
    """Operators that ran after the last tensor was saved: what an early stop would spare."""


class Watch(TorchDispatchMode):
    """Compares what a dry run saves with what the forward saved, and counts what comes after."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes, self._dtypes, self._devices = frame.shapes, frame.dtypes, frame.devices
        self._misfits = frame.misfits
        self.packed = 0
        self.operators_since = 0
        self._saved: list[torch.Tensor] = []
        """Here rather than in the dry run's graph, which others may hold on to."""

    def pack(self, tensor: torch.Tensor) -> int:
        index = self.packed
        self.packed = index + 1
        kind = tensor.shape, tensor.dtype, tensor.get_device()
        if index < len(self._shapes) and kind != (
            self._shapes[index],
            self._dtypes[index],
            self._devices[index],
        ):
            self._misfits.append((index, *kind))
        self._saved.append(tensor.detach())
        self.operators_since = 0
        return index

    def unpack(self, index: int) -> torch.Tensor:
        """For a backward inside the function."""
        return self._saved[index]

    def let_go(self) -> None:
        """The function has returned."""
        self._saved = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators_since += 1
        return func(*args, **(kwargs or {}))


_FAIR_DIFFERENCE = 0.002
"""The distance, as a share of the size, that a kernel which sums in any order may make."""


def alike(a: Any, b: Any) -> bool:
    """Whether two outputs agree; on a GPU up to what kernels that sum in any order may change."""
    pairs = list(zip(tensors_in(a), tensors_in(b), strict=False))
    return all(x.shape == y.shape and x.dtype == y.dtype and _close(x, y) for x, y in pairs)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As a rule they are equal, and on a GPU each kernel that was not used yet takes long to load.
    if a.device.type == "meta" or torch.equal(a, b):
        return True
    if a.device.type == "cpu" or not (a.is_floating_point() or a.is_complex()):
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    with torch.no_grad():
        distance, size = (a - b).norm(), a.norm()
        if size.isfinite():
            return bool(distance <= _FAIR_DIFFERENCE * size)
        return torch.equal(a.isfinite(), b.isfinite())
