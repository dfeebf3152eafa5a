"""CUDA's caching allocator, set up for batches of varying size while mimose is attached.

With PyTorch's default settings the allocator takes memory in segments of fixed size. Batches of
varying size leave gaps in these that nothing fits, and a budget that every plan respects is
exceeded all the same. Expandable segments grow and shrink in pages instead.

The settings belong to the process. The first handle on a CUDA device makes them, the last one to
detach puts back what was there. They are left alone where the user has configured the allocator,
where another backend is in use, and where somebody else keeps a memory pool, since pools with an
allocator of their own do not go together with expandable segments (pytorch#147851).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from mimose.errors import ArgumentError

log = logging.getLogger("mimose")

CHOICES = ("auto", "leave")
"""What `allocator=` may be."""
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where the environment configures the allocator."""
_PAGE = "large_segment_size_mb"
_PAGE_MIB, _DEFAULT_PAGE_MIB = 12, 20
_POOL_LIBRARIES = ("vllm.device_allocator.cumem", "torch_memory_saver")
"""Libraries that free and map the memory of pools behind the allocator's back."""

ALLOCATOR_SETTINGS = f"expandable_segments:True,{_PAGE}:{_PAGE_MIB}"
"""What suits varying sizes: segments that grow, in pages of 12 MiB instead of 20. Pages are taken
and given back as a whole, so smaller ones leave less unused."""
_DEFAULTS = f"expandable_segments:False,{_PAGE}:{_DEFAULT_PAGE_MIB}"
"""What puts every key back where nothing was configured: the setter resets to their defaults, or
leaves at them, the keys that its string does not name."""


def refuse_choice(choice: object) -> None:
    if choice not in CHOICES:
        raise ArgumentError(
            f"allocator={choice!r} is neither 'auto' (mimose sets PyTorch's CUDA allocator up for "
            "varying sizes) nor 'leave' (it stays as it is)"
        )


class AllocatorLease:
    """One handle's claim to the allocator's settings, from `take` to `give_back`."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._asked = self._held = False
        self.left_because: str | None = None
        """Why the settings were left alone, if they were although nobody had asked for that."""

    def take(self, device: torch.device) -> bool:
        """Have the allocator set up, if this is a CUDA device and nothing speaks against it.

        Whether there is something to give back now that was not before.
        """
        if self._asked or device.type != "cuda":
            return False
        self._asked = True
        if self._choice == "auto":
            self.left_because = PROCESS.hold()
            self._held = self.left_because is None
        return self._held

    def give_back(self) -> None:
        if self._held:
            self._held = False
            PROCESS.release()


class ProcessAllocator:
    """The allocator's settings in this process, and how many handles need them."""

    def __init__(self) -> None:
        self._holders = 0

    def hold(self) -> str | None:
        """Set the allocator up unless it is; the reason if it must be left alone."""
        if not self._holders and (reason := why_left_alone()) is not None:
            return reason
        if not self._holders:
            if not _change(ALLOCATOR_SETTINGS):
                return "this version of torch cannot change it in a running process"
            if not current_settings().get("expandable_segments", True):
                _change(_DEFAULTS)
                return "expandable segments are not supported on this platform"
            log.info(
                "mimose has set PyTorch's CUDA allocator up for batches of varying size (%s); "
                "detaching puts it back, allocator='leave' leaves it as it is",
                ALLOCATOR_SETTINGS,
            )
        self._holders += 1
        return None

    def release(self) -> None:
        """One holder less; the last one puts back every key, unless others have changed them."""
        self._holders -= 1
        if not self._holders and settings_string() == ALLOCATOR_SETTINGS:
            _change(_DEFAULTS)


PROCESS = ProcessAllocator()
"""The settings are the process's, so there is one of these."""


def why_left_alone() -> str | None:
    """What speaks against changing the allocator's settings; None if nothing does."""
    for name in VARIABLES:
        if os.environ.get(name, "").strip():
            return f"{name}={os.environ[name]} configures it"
    backend = allocator_backend()
    if backend != "native":
        return f"its backend is {backend}"
    if settings_string() not in ("", _DEFAULTS):
        return f"{settings_string()!r} was set in this process"
    return _pool_in_use()


def set_up_for_good() -> None:
    """For programs: set the allocator up for the rest of the process, unless somebody has."""
    if torch.cuda.is_available():
        PROCESS.hold()


def allocator_backend() -> str:
    """`"native"`, `"cudaMallocAsync"`, or what a pluggable allocator calls itself."""
    try:
        return str(torch.cuda.memory.get_allocator_backend())
    except (AttributeError, RuntimeError):
        return "native"


def current_settings() -> dict[str, Any]:
    """The allocator's settings by name, as far as PyTorch tells."""
    snapshot = getattr(torch.cuda.memory, "_snapshot", None)
    if snapshot is None or not torch.cuda.is_available():
        return {}
    try:
        return dict(snapshot().get("allocator_settings", {}))
    except RuntimeError:  # other backends have no snapshots
        return {}


def settings_string() -> str:
    """The string that the environment or a call in the process has last set."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return str(read() if read else current_settings().get("PYTORCH_CUDA_ALLOC_CONF", ""))


def page_bytes_in(settings: str) -> int:
    """The pages in which expandable segments grow where the allocator is set up so."""
    given = re.search(rf"{_PAGE}\s*:\s*(\d+)", settings)
    return (int(given[1]) if given else _DEFAULT_PAGE_MIB) << 20


def in_pool(segments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any of a snapshot's segments belongs to a memory pool."""
    return any(tuple(s.get("segment_pool_id", (0, 0))) != (0, 0) for s in segments)


def _pool_in_use() -> str | None:
    for library in _POOL_LIBRARIES:
        if library in sys.modules:
            return f"{library} keeps memory pools of its own"
    if torch.cuda.is_initialized() and in_pool(torch.cuda.memory_snapshot()):
        return "a memory pool (torch.cuda.MemPool or a CUDA graph) is in use"
    return None


def _change(settings: str) -> bool:
    """Whether it worked. Cached memory goes first: it lies in segments of the other kind."""
    change: Callable[[str], None] | None
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if change is None:
        return False
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(RuntimeError, ValueError):
        change(settings)
        return True
    return False
