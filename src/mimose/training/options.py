"""What a user asks for when attaching, beside the model, its blocks and the budget."""

from __future__ import annotations

from dataclasses import dataclass

from mimose.costs import Option
from mimose.tensors import SizeFunction
from mimose.training.collector import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a handle's steps are to run."""

    collector: type[Collector] = Collector
    enforce: bool = False
    """Whether the budget is also the allocator's hard limit."""
    allocator: str = "auto"
    input_size: SizeFunction | None = None
    """The user's own measure of a batch."""
    host_bytes: int | None = None
    """Host memory that activations may take; None for as much as is reasonable."""
    choices: frozenset[Option] = frozenset(Option)
    """The options that plans may use."""
    observe_only: bool = False
    """Observe every step with every block recomputed, and never plan: for measuring."""
