"""Detects the regime in which a step runs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from mimose.costs import Regime

_SAMPLE, _LARGEST = 64, 8
_is_trained = operator.attrgetter("requires_grad")


class Lookout:
    """Detects the present regime in a few microseconds."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._sample = _sample_of(list(model.parameters()))
        self._configs = _configs_of(model)
        self._device = device.type
        self._last: tuple[Any, Regime] | None = None
        """The signs that the last regime was derived from, and that regime."""

    def regime(self) -> Regime:
        """The present regime; the same object until it changes."""
        autocast = None
        if torch.is_autocast_enabled(self._device):
            autocast = torch.get_autocast_dtype(self._device)
        attention = [config._attn_implementation for config in self._configs]
        dtype = self._sample[0].dtype if self._sample else None
        signs = autocast, attention, list(map(_is_trained, self._sample)), dtype
        if self._last is None or self._last[0] != signs:
            self._last = signs, _regime_of(*signs)
        return self._last[1]


def _regime_of(
    autocast: torch.dtype | None,
    attention: list[Any],
    trained: list[bool],
    dtype: torch.dtype | None,
) -> Regime:
    names = [str(name or "") for name in attention]
    if len(set(names)) == 1:
        names = names[:1]
    return Regime(str(autocast or ""), " and ".join(names), tuple(trained), str(dtype or ""))


def _sample_of(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters spread over the whole model, so that no layer is missed, and the largest ones."""
    largest = set(sorted(parameters, key=lambda p: -p.numel())[:_LARGEST])
    every = max(1, -(-len(parameters) // _SAMPLE))
    return [p for i, p in enumerate(parameters) if i % every == 0 or p in largest]


def _configs_of(model: nn.Module) -> list[Any]:
    """The configs that name an attention implementation: one, or one for each part of a model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    named = {id(c): c for c in configs if hasattr(c, "_attn_implementation")}
    return list(named.values())
