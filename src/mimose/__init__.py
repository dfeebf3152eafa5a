"""Train a PyTorch model under a memory budget: as fast as the memory allows, never over it."""

from mimose.api import Mimose, auto_checkpoint, checkpoint
from mimose.errors import (
    ArgumentError,
    BlocksError,
    BudgetError,
    ConflictError,
    MimoseError,
    MimoseWarning,
    OutOfMemory,
    RecomputeError,
)

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BlocksError",
    "BudgetError",
    "ConflictError",
    "Mimose",
    "MimoseError",
    "MimoseWarning",
    "OutOfMemory",
    "RecomputeError",
    "auto_checkpoint",
    "checkpoint",
]
