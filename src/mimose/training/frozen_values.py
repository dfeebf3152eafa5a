"""Frozen parameters that a forward updates in place, such as a codebook of moving averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mimose.tensors import local_tensor, version_of

_COPIED_BYTES = 1 << 16
"""Larger ones are copied once they were seen to change: most frozen parameters never do."""


class FrozenValues:
    """Copies of those frozen parameters that are small, or known to change.

    A copy is made anew only after the parameter's version has moved.
    """

    def __init__(self) -> None:
        self._versions: list[tuple[nn.Parameter, int]] = []
        self._copies: dict[nn.Parameter, tuple[int, torch.Tensor]] = {}
        self._changing: set[nn.Parameter] = set()

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Store the values of these parameters."""
        self._versions = [(p, version_of(p)) for p in parameters]
        former = self._copies
        self._copies = {}
        for parameter, version in self._versions:
            copied = former.get(parameter)
            if copied is not None and copied[0] == version:
                self._copies[parameter] = copied
            elif parameter in self._changing or _is_small(parameter):
                self._copies[parameter] = version, local_tensor(parameter.detach()).clone()

    def overwritten(self) -> nn.Parameter | None:
        """A parameter that was changed without a copy of its former value."""
        return next((p for p in self._changed() if p not in self._copies), None)

    def give_back(self) -> None:
        """Restore the values."""
        for parameter in self._changed():
            if parameter in self._copies:
                with torch.no_grad():
                    local_tensor(parameter.detach()).copy_(self._copies[parameter][1])
        self._versions = [(p, version_of(p)) for p, _ in self._versions]
        current = dict(self._versions)
        self._copies = {p: (current[p], value) for p, (_, value) in self._copies.items()}

    def release(self) -> None:
        """The step is over: remember which parameters its forwards have changed."""
        self._changing.update(self._changed())
        self._changing.intersection_update([p for p, _ in self._versions])
        self._versions = []

    def _changed(self) -> list[nn.Parameter]:
        return [p for p, version in self._versions if version_of(p) != version]


def _is_small(parameter: nn.Parameter) -> bool:
    tensor = local_tensor(parameter)
    return tensor.layout is torch.strided and tensor.nbytes <= _COPIED_BYTES
