"""Of which model, on which device, something was learned; and why it is of no use for another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

FORMAT = 1


def identity_of(model: nn.Module, blocks: Sequence[str], device: torch.device) -> dict[str, Any]:
    """What must be the same for learned costs to hold, as plain numbers and strings."""
    shapes = [(tuple(p.shape), str(p.dtype)) for p in model.parameters()]
    kinds = [type(module).__name__ for module in model.modules()]
    return {
        "blocks": len(blocks),
        "precision": ", ".join(sorted({dtype for _, dtype in shapes})),
        "model": hashlib.sha256(repr((list(blocks), shapes, kinds)).encode()).hexdigest()[:16],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
    }


def difference(state: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Why what was saved is of no use for a model of this identity, in words; None if it is."""
    if "format" not in state:
        return f"it is not what handle.state_dict() gave{_hint(state)}"
    if state["format"] != FORMAT:
        return f"its format is {state.get('format')!r}, not {FORMAT}"
    known = state.get("identity", present)
    for name, value in present.items():
        if known.get(name) != value:
            if name == "model":
                return "it is of a model with other modules or parameters"
            return f"{name} was {known.get(name)!r} then and is {value!r} here"
    return None


def _hint(state: Mapping[str, Any]) -> str:
    """Where in a checkpoint what was meant is, if it is there."""
    for name, value in state.items():
        if isinstance(value, Mapping) and value.get("format") == FORMAT:
            return f", but has it at {name!r}: pass that"
    return ""
