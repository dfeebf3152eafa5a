"""Configure CUDA's caching allocator for batches of varying size while mimose is attached.

With PyTorch's default settings the allocator reserves memory in segments of fixed size. Batches of
varying size leave gaps in them that fit no other tensor, so reserved memory exceeds the budget
although every plan respects it. Expandable segments grow and shrink in pages instead.

The settings apply to the whole process. The first handle on a CUDA device changes them, the last
one to detach restores the defaults. They stay unchanged if the user has configured the allocator,
if another backend is in use, or if memory pools are in use: pools with an allocator of their own
do not work with expandable segments (pytorch#147851).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from mimose.errors import ArgumentError

log = logging.getLogger("mimose")

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The environment variables that configure the allocator."""
_PAGE = "large_segment_size_mb"
_PAGE_MIB, _DEFAULT_PAGE_MIB = 12, 20
_POOL_LIBRARIES = ("vllm.device_allocator.cumem", "torch_memory_saver")
"""Libraries that map and unmap the memory of pools themselves."""

ALLOCATOR_SETTINGS = f"expandable_segments:True,{_PAGE}:{_PAGE_MIB}"
"""Expandable segments with pages of 12 MiB instead of 20. The allocator maps and unmaps whole
pages, so smaller pages leave less memory unused."""
_DEFAULTS = f"expandable_segments:False,{_PAGE}:{_DEFAULT_PAGE_MIB}"
"""Restores the defaults. The setter resets every key that its string does not name."""


def refuse_allocator_choice(choice: object) -> None:
    """Raise unless `allocator=` is one of the two choices."""
    if choice not in ("auto", "leave"):
        raise ArgumentError(
            f"allocator={choice!r} is neither 'auto' (mimose configures PyTorch's CUDA allocator "
            "for varying sizes) nor 'leave' (mimose does not change it)"
        )


class AllocatorLease:
    """One handle's use of the allocator settings, from `take` to `give_back`."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._tried = self._held = False
        self.reason_not_configured: str | None = None
        """Why the allocator was not configured; None if it was, or was not meant to be."""

    def take(self, device: torch.device) -> bool:
        """Configure the allocator if this is a CUDA device and nothing prevents it.

        Returns whether this call took the lease.
        """
        if self._tried or device.type != "cuda":
            return False
        self._tried = True
        if self._choice == "auto":
            self.reason_not_configured = PROCESS.hold()
            self._held = self.reason_not_configured is None
        return self._held

    def give_back(self) -> None:
        if self._held:
            self._held = False
            PROCESS.release()


class ProcessAllocator:
    """The allocator settings of this process, with a count of the handles that use them."""

    def __init__(self) -> None:
        self._holders = 0

    def hold(self) -> str | None:
        """Configure the allocator for the first holder; return the reason if that fails."""
        if not self._holders:
            reason = reason_not_to_configure() or self._configure()
            if reason is not None:
                return reason
        self._holders += 1
        return None

    def _configure(self) -> str | None:
        if not _change(ALLOCATOR_SETTINGS):
            return f"PyTorch refuses the settings {ALLOCATOR_SETTINGS}"
        if not current_settings().get("expandable_segments", True):
            _change(_DEFAULTS)
            return "expandable segments are not supported on this platform"
        log.info(
            "mimose has configured PyTorch's CUDA allocator for batches of varying size (%s); "
            "detaching restores it, allocator='leave' does not change it",
            ALLOCATOR_SETTINGS,
        )
        return None

    def release(self) -> None:
        """Restore the defaults after the last holder, unless other code changed the settings."""
        self._holders -= 1
        if not self._holders and settings_string() == ALLOCATOR_SETTINGS:
            _change(_DEFAULTS)


PROCESS = ProcessAllocator()
"""The one instance: allocator settings are global to the process."""


def reason_not_to_configure() -> str | None:
    """Why mimose should not change the allocator settings; None if it may."""
    for name in ALLOCATOR_VARIABLES:
        if os.environ.get(name, "").strip():
            return f"{name}={os.environ[name]} configures it"
    backend = allocator_backend()
    if backend != "native":
        return f"its backend is {backend}"
    if settings_string() not in ("", _DEFAULTS):
        return f"{settings_string()!r} was set in this process"
    return _pool_in_use()


def configure_for_process() -> None:
    """For programs: configure the allocator for the rest of the process, if nothing prevents it."""
    if torch.cuda.is_available():
        PROCESS.hold()


def allocator_backend() -> str:
    """`"native"`, `"cudaMallocAsync"`, or the name of a pluggable allocator."""
    try:
        return str(torch.cuda.memory.get_allocator_backend())
    except (AttributeError, RuntimeError):
        return "native"


def current_settings() -> dict[str, Any]:
    """The allocator's settings by name; empty where PyTorch does not report them."""
    if not torch.cuda.is_available():
        return {}
    try:
        return dict(torch.cuda.memory._snapshot().get("allocator_settings", {}))
    except RuntimeError:  # other backends have no snapshots
        return {}


def settings_string() -> str:
    """The settings string last set by the environment or by a call."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # PyTorch 2.12 or later
    return str(read() if read else current_settings().get("PYTORCH_CUDA_ALLOC_CONF", ""))


def page_bytes_in(settings: str) -> int:
    """The page size of expandable segments under these settings."""
    given = re.search(rf"{_PAGE}\s*:\s*(\d+)", settings)
    return (int(given[1]) if given else _DEFAULT_PAGE_MIB) << 20


def in_pool(segments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any segment of a snapshot belongs to a memory pool."""
    return any(tuple(s.get("segment_pool_id", (0, 0))) != (0, 0) for s in segments)


def _pool_in_use() -> str | None:
    for library in _POOL_LIBRARIES:
        if library in sys.modules:
            return f"{library} keeps memory pools of its own"
    if torch.cuda.is_initialized() and in_pool(torch.cuda.memory_snapshot()):
        return "a memory pool (torch.cuda.MemPool or a CUDA graph) is in use"
    return None


def _change(settings: str) -> bool:
    """Change the settings; returns whether that worked.

    Empties the cache first, because cached memory lies in segments of the old kind.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(RuntimeError, ValueError):
        torch._C._accelerator_setAllocatorSettings(settings)
        return True
    return False
