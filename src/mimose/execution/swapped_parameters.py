"""Parameters that `torch.func.functional_call` has replaced with other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.execution.temporary_values import run_with

ParameterSlot = tuple[dict[str, Any], str]
"""A module's `_parameters` and the name of one of them."""


class SwappedParameters:
    """The tensors that replaced parameters in a forward. Its recompute needs them again."""

    __slots__ = ("_values",)

    def __init__(self, values: list[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
        self._values = values

    @classmethod
    def among(cls, slots: list[ParameterSlot]) -> SwappedParameters | None:
        """The replaced parameters in these slots; None if every slot holds a parameter."""
        values = [
            (parameters, name, value)
            for parameters, name in slots
            if type(value := parameters.get(name)) is not nn.Parameter
            and value is not None
            and not isinstance(value, nn.Parameter)
            and not _is_fsdp_view(value)
        ]
        return cls(values) if values else None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with these tensors in place, then restore the present ones."""
        return run_with(self._values, function, *args)


def parameter_slots(module: nn.Module) -> list[ParameterSlot]:
    """The parameter slots of a module and its submodules, except scripted ones."""
    parts = (part for part in module.modules() if isinstance(part._parameters, dict))
    return [(part._parameters, name) for part in parts for name in part._parameters]


def _is_fsdp_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of FSDP1's flat parameter."""
    return getattr(tensor._base, "_is_flat_param", False)
