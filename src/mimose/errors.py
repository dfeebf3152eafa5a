"""Every error and warning that mimose raises.

MimoseError
├── RecomputeError      also a torch.utils.checkpoint.CheckpointError
├── BlocksError         also a ValueError: the blocks cannot be told
├── BudgetError         also a ValueError: the budget cannot be read
├── ArgumentError       also a ValueError: an unknown planner, collector, …
├── ConflictError       also a RuntimeError: something else already checkpoints, or
│                       spreads the model in a way that mimose cannot serve
└── OutOfMemory         also a torch.OutOfMemoryError: not even with every block recomputed

MimoseWarning           a UserWarning: training goes on, and this is what you should know
"""

import sys
import warnings

import torch
from torch.utils.checkpoint import CheckpointError


class MimoseError(Exception):
    """The root of all errors that mimose raises."""


class RecomputeError(MimoseError, CheckpointError):
    """A recompute did not rebuild what its forward had saved."""


class BlocksError(MimoseError, ValueError):
    """No blocks were found, or those asked for cannot be used."""


class BudgetError(MimoseError, ValueError):
    """A memory budget that cannot be read."""


class ArgumentError(MimoseError, ValueError):
    """An argument that names nothing mimose knows."""


class ConflictError(MimoseError, RuntimeError):
    """Something outside mimose's reach already manages these activations."""


class OutOfMemory(MimoseError, torch.OutOfMemoryError):
    """A step does not fit, not even with every block recomputed.

    Its text contains " out of memory." on every device: accelerate's `find_executable_batch_size`,
    and with it transformers' `auto_find_batch_size`, look for these words.
    """

    _FACT = "The step ran out of memory."

    def __init__(self, details: str = "") -> None:
        told = details.startswith(self._FACT)  # an unpickled one brings its whole text
        super().__init__(details if told else f"{self._FACT} {details}".rstrip())


class MimoseWarning(UserWarning):
    """Training goes on; this is what its owner should know."""


def warn(message: str) -> None:
    """Say something that the owner of a run should know, at the line of theirs that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MimoseWarning, stacklevel=level)


_LIBRARIES = frozenset(
    {
        *("mimose", "torch", "transformers", "accelerate", "trl", "peft"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "contextlib", "functools"),
    }
)
"""Whose lines lie between the owner's and ours."""


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
