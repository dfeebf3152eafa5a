"""Running out of memory: how to know it, and how to let go of what the error holds."""

from __future__ import annotations

import traceback

import torch

_WORDS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # cuDNN tries one engine after another and swallows each one's error; as a rule it was this.
    "unable to find an engine to execute this computation",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has run out of memory, by whichever library it was noticed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def forget(error: BaseException, *, sparing: BaseException | None = None) -> None:
    """Let go of all tensors that the frames of an error, and of those behind it, hold.

    Not behind one that was being dealt with before: that is the caller's.
    """
    seen: set[int] = {id(sparing)}
    behind: list[BaseException | None] = [error]
    while behind:
        one = behind.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        behind += [one.__cause__, one.__context__]
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
