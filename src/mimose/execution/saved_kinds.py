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
        self.shapes: list[tuple[Any, ...] | None] = []
        """None for a tensor of unknown kind."""
        self.dtypes: list[torch.dtype | None] = []
        self.devices: list[int] = []
        self.misfits: list[tuple[int, tuple[Any, ...], torch.dtype, int]] = []
        """Mismatches: index, and shape, dtype and device of the rebuilt tensor.

        The tensor itself is not stored, since it would stay alive.
        """

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Record the tensors that a forward has saved; None for one that is gone."""
        self.shapes = [None if tensor is None else shape_of(tensor) for tensor in tensors]
        self.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        self.devices = [-1 if tensor is None else tensor.get_device() for tensor in tensors]

    def compare(self, index: int, tensor: torch.Tensor) -> None:
        """Record a mismatch if the rebuilt tensor is not of the kind that was saved."""
        shape = self.shapes[index]
        if shape is not None and (
            shape != shape_of(tensor)
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


def _in_words(shape: tuple[Any, ...] | None, dtype: torch.dtype | None, device: int) -> str:
    where = "the CPU" if device < 0 else f"device {device}"
    return f"{list(shape or ())} {str(dtype).removeprefix('torch.')} on {where}"
