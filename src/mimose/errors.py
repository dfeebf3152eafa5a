"""All errors and warnings that mimose raises.

MimoseError
├── RecomputeError      also a torch.utils.checkpoint.CheckpointError
├── BlocksError         also a ValueError: no usable blocks
├── BudgetError         also a ValueError: not a memory size
├── ArgumentError       also a ValueError: any other invalid argument
├── ConflictError       also a RuntimeError: other checkpointing, offloading or parallelism that
│                       mimose cannot work with
└── OutOfMemory         also a torch.OutOfMemoryError: too large even with every block recomputed

MimoseWarning           a UserWarning: training continues
"""

import sys
import warnings

import torch
from torch.utils.checkpoint import CheckpointError


class MimoseError(Exception):
    """Base class of all mimose errors."""


class RecomputeError(MimoseError, CheckpointError):
    """A recompute did not reproduce the tensors that the forward had saved."""


class BlocksError(MimoseError, ValueError):
    """No blocks were found, or the selected ones cannot be used."""


class BudgetError(MimoseError, ValueError):
    """The memory budget is not a valid size."""


class ArgumentError(MimoseError, ValueError):
    """An argument has an invalid value."""


class ConflictError(MimoseError, RuntimeError):
    """The model is already managed by something that mimose cannot work with."""


class OutOfMemory(MimoseError, torch.OutOfMemoryError):
    """A step does not fit into memory, even with every block recomputed.

    The message always contains " out of memory.", because accelerate's
    `find_executable_batch_size` and transformers' `auto_find_batch_size` search for these words.
    """

    _PREFIX = "The step ran out of memory."

    def __init__(self, details: str = "") -> None:
        complete = details.startswith(self._PREFIX)  # unpickling passes the whole message
        super().__init__(details if complete else f"{self._PREFIX} {details}".rstrip())


class MimoseWarning(UserWarning):
    """Training continues, but the user should know about or fix something."""


def warn(message: str) -> None:
    """Issue a `MimoseWarning` that points at the innermost line of user code."""
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
"""Packages whose stack frames `warn` skips."""


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
