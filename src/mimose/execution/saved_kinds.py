"""What kind of tensors a forward saved, and whether a recompute saves the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SavedKinds:
    """Shape, type and device of each tensor that a forward saved, in plain lists.

    Each object that Python's garbage collector must follow would cost more than the work itself.
    """

    __slots__ = ("devices", "dtypes", "misfits", "shapes")

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []
        self.dtypes: list[torch.dtype] = []
        self.devices: list[int] = []
        self.misfits: list[tuple[int, torch.Size, torch.dtype, int]] = []
        """Which tensors were rebuilt as something else, and as what: not these themselves."""

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """A forward has saved these, and they are still there."""
        self.shapes = [tensor.shape for tensor in tensors]
        self.dtypes = [tensor.dtype for tensor in tensors]
        self.devices = [tensor.get_device() for tensor in tensors]

    def compare(self, index: int, tensor: torch.Tensor) -> None:
        """Note if the tensor that was rebuilt is not of the kind that was saved."""
        if (
            self.shapes[index] != tensor.shape
            or self.dtypes[index] is not tensor.dtype
            or self.devices[index] != tensor.get_device()
        ):
            self.misfits.append((index, tensor.shape, tensor.dtype, tensor.get_device()))

    def describe_misfits(self) -> str:
        """What was rebuilt otherwise, in words; forgets it."""
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


def _in_words(shape: torch.Size, dtype: torch.dtype, device: int) -> str:
    where = "the CPU" if device < 0 else f"device {device}"
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {where}"
