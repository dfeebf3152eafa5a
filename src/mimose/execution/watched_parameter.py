"""Detect that a forward changes a parameter: its recompute would change it again."""

from __future__ import annotations

import torch
from torch import nn

from mimose.tensors import dense_parts, local_tensor, version_of


class WatchedParameter:
    """A parameter and what tells whether it changes: its version, and, because changes through
    `.data` do not count versions, sums that take no memory to compute."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self._parameter = name, parameter
        self._version, self._sums = version_of(parameter), _sums_of(parameter)

    @property
    def changed(self) -> bool:
        """Whether its values have changed since."""
        if version_of(self._parameter) != self._version:
            return True
        now = None if self._sums is None else _sums_of(self._parameter)
        if self._sums is None or now is None:
            return False
        return not torch.allclose(now, self._sums, rtol=0, atol=0, equal_nan=True)


def _sums_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """The sum and the norm of the values; None if there are none, or not as plain numbers."""
    try:
        values = dense_parts(local_tensor(parameter.detach()))[-1]
        if values.is_meta or not values.is_floating_point():
            return None
        dtype = torch.promote_types(values.dtype, torch.float32)
        return torch.stack((values.sum(dtype=dtype), torch.linalg.vector_norm(values, dtype=dtype)))
    except (RuntimeError, ValueError, NotImplementedError):  # not initialized yet; quantized
        return None
