"""Blocks of one make: what one of them has shown in its first run need not be tried on the rest."""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

from torch import nn

_TELLING = (bool, float, str, types.FunctionType, types.BuiltinFunctionType, type)
"""Attributes by which blocks of one class may still do different things: rates, switches, names of
kernels. Not whole numbers, which often count layers; where they matter, shapes tell."""
_OWN = frozenset(vars(nn.Module())) - {"training"}


def make_of(block: nn.Module) -> Hashable:
    """What a block is made of: equal for blocks that do the same with the same kind of input."""
    return tuple((name, type(part), _attributes(part)) for name, part in block.named_modules())


def _attributes(part: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value if isinstance(value, _TELLING) else type(value))
        for name, value in vars(part).items()
        if name not in _OWN
    )
