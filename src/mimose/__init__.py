"""Train a PyTorch model under a memory budget: as fast as the memory allows, never over it."""

from mimose.recompute import checkpoint

__version__ = "0.1.0"

__all__ = ["checkpoint"]
