"""Parameters that `torch.func.functional_call` has replaced with other tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mimose.execution.temporary_values import Entry

ParameterSlot = tuple[dict[str, Any], str]
"""A module's `_parameters` and the name of one of them."""


def swapped_parameters(slots: list[ParameterSlot]) -> list[Entry]:
    """The slots whose parameters are replaced now, with the tensors in them.

    A recompute needs these tensors again.
    """
    return [
        (parameters, name, value)
        for parameters, name in slots
        if type(value := parameters.get(name)) is not nn.Parameter
        and value is not None
        and not isinstance(value, nn.Parameter)
        and not _is_fsdp_view(value)
    ]


def parameter_slots(module: nn.Module) -> list[ParameterSlot]:
    """The parameter slots of a module and its submodules, except scripted ones."""
    parts = (part for part in module.modules() if isinstance(part._parameters, dict))
    return [(part._parameters, name) for part in parts for name in part._parameters]


def _is_fsdp_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of FSDP1's flat parameter."""
    return getattr(tensor._base, "_is_flat_param", False)
