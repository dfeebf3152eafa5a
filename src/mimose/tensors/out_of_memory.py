"""Detect out-of-memory errors, and free the tensors that a traceback keeps alive."""

from __future__ import annotations

import traceback

import torch

_MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # cuDNN tries several engines and hides each one's error, which is usually out of memory.
    "unable to find an engine to execute this computation",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device ran out of memory, whichever library raised it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def release_traceback(error: BaseException, *, keep: BaseException | None = None) -> None:
    """Free the tensors in the frames of an error, and of its causes and contexts.

    `keep` is an exception that the caller was already handling: it and its chain stay intact.
    """
    seen: set[int] = {id(keep)}
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
