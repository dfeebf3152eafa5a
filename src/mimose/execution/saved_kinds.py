"""Compare the kinds of tensors that a forward saved with those that its recompute saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mimose.tensors import shape_of


class SavedKinds:
    """Shape, dtype and device of each tensor that a forward saved, in plain lists.

    One object per tensor would cost more time in Python's garbage collector than the work itself.
    """

    __slots__ = ("devices", "dtypes", "misfits", "shapes")

    def __init__(self) -> None:
        self.shapes: list[tuple[Any, ...]] = []
        self.dtypes: list[torch.dtype] = []
        self.devices: list[int] = []
        self.misfits: list[tuple[int, tuple[Any, ...], torch.dtype, int]] = []
        """Mismatches: index, and shape, dtype and device of the rebuilt tensor.

        The tensor itself is not stored, since it would stay alive.
        """

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the tensors that a forward has saved and that are still alive."""
        try:
            self.shapes = [tensor.shape for tensor in tensors]
        except RuntimeError:  # one is nested
            self.shapes = list(map(shape_of, tensors))
        self.dtypes = [tensor.dtype for tensor in tensors]
        self.devices = [tensor.get_device() for tensor in tensors]

    def compare(self, index: int, tensor: torch.Tensor) -> None:
        """Record a mismatch if the rebuilt tensor is not of the kind that was saved."""
        if (
            self.shapes[index] != shape_of(tensor)
            or self.dtypes[index] is not tensor.dtype
            or self.devices[index] != tensor.get_device()
        ):
            self.misfits.append((index, shape_of(tensor), tensor.dtype, tensor.get_device()))

    def describe_misfits(self) -> str:
        """Describe the mismatches in words, and clear them."""
        lines = [
            f"tensor at position {i}: saved "
            f"{_in_words(self.shapes[i], self.dtypes[i], self.devices[i])}, "
            f"recomputed {_in_words(shape, dtype, device)}"
            for i, shape, dtype, device in self.misfits
        ]
        self.misfits.clear()
        return (
            "Recomputed values for the following tensors have different metadata than during the "
            "forward pass: " + "; ".join(lines)
        )


def _in_words(shape: tuple[Any, ...], dtype: torch.dtype, device: int) -> str:
    where = "the CPU" if device < 0 else f"device {device}"
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {where}"
