"""Blocks whose weights `parametrize.cached()` computes only once.

The first forward that reads a parametrized weight computes it; others find it in the cache. In the
backward the cache is usually empty, so a recompute saves other tensors than its forward.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

KEPT_WHILE_CACHED = (
    "and others like it have parametrized weights. They are kept while "
    "torch.nn.utils.parametrize.cached() is active, since a recompute would not find the cached "
    "weights: run the model without it if memory is short"
)


def finds_cached_weights(block: nn.Module) -> bool:
    """Whether a forward of the block takes weights from the cache. Quick unless one is active."""
    if not getattr(parametrize, "_cache_enabled", 0):  # without this name, no cache is noticed
        return False
    return any(map(parametrize.is_parametrized, block.modules()))
