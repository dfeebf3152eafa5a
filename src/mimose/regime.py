"""What decides a block's costs besides the size of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

_SAMPLE = 64


class Regime(NamedTuple):
    """The circumstances of a step; what was learned in one regime does not hold in another."""

    autocast: str
    """The type that operators are cast to; empty if they are not."""
    attention: str
    """The attention implementation, where the model's configuration names one."""
    trained: tuple[bool, ...]
    """Whether parameters are trained, by a sample."""


class Lookout:
    """Sees in which regime a step runs, in a few microseconds."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = list(model.parameters())
        self._sample = parameters[:: max(1, -(-len(parameters) // _SAMPLE))]
        self._config = _config_of(model)
        self._device = device.type

    def regime(self) -> Regime:
        """The present one."""
        autocast = ""
        if torch.is_autocast_enabled(self._device):
            autocast = str(torch.get_autocast_dtype(self._device))
        attention = getattr(self._config, "_attn_implementation", None)
        return Regime(
            autocast, str(attention or ""), tuple([p.requires_grad for p in self._sample])
        )


def _config_of(model: nn.Module) -> Any:
    """The configuration of the outermost module that names its attention implementation."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((c for c in configs if hasattr(c, "_attn_implementation")), None)
