"""One piece of host memory from the system, and the parts of it that the arena hands out."""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from bisect import insort
from collections import deque
from contextlib import suppress
from typing import NamedTuple

import torch

from mimose.memory.host_limit import free_host_bytes
from mimose.units import text_of

ALIGNMENT = 512
"""Parts start and end at multiples of this many bytes."""
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""Huge pages are pinned faster."""
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None
"""A child process gets empty pages. If it shared pinned ones, the next write could go to a copy,
which the device does not know."""


class PinningError(Exception):
    """The system did not provide host memory."""


class ShortageError(PinningError):
    """So much host memory is not free at the moment."""


class HostPiece(NamedTuple):
    """A contiguous range of bytes in a segment."""

    segment: HostSegment
    begin: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.segment.address + self.begin

    @property
    def tensor(self) -> torch.Tensor:
        """These bytes as a CPU tensor."""
        return self.segment.tensor[self.begin : self.begin + self.nbytes]


class HostSegment:
    """One allocation from the system, handed out in parts, first fit."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.tensor = _pinned(nbytes, device) if device.type == "cuda" else _mapped(nbytes)
        self.address = self.tensor.data_ptr()
        if device.type == "cuda":
            weakref.finalize(self, unpin, self.tensor, device).atexit = False
        self._free: list[tuple[int, int]] = [(0, nbytes)]
        """Free ranges as (begin, bytes), sorted."""
        self._returned: deque[tuple[int, int]] = deque()
        """Ranges that were given back and are not in `_free` yet."""
        self._lock = threading.Lock()
        self._in_use = 0

    @property
    def in_use(self) -> int:
        with self._lock:
            self._merge_returned()
            return self._in_use

    def take(self, nbytes: int) -> HostPiece | None:
        """A contiguous piece of this many bytes; None if no free range is large enough."""
        with self._lock:
            self._merge_returned()
            for k, (_, size) in enumerate(self._free):
                if size >= nbytes:
                    return self._cut(k, nbytes)
        return None

    def take_largest(self, most_bytes: int) -> HostPiece | None:
        """The largest free range, cut to `most_bytes`; None if nothing is free."""
        most_bytes = aligned(most_bytes)
        with self._lock:
            self._merge_returned()
            if not self._free:
                return None
            k, (_, size) = max(enumerate(self._free), key=lambda pair: pair[1][1])
            return self._cut(k, min(size, most_bytes))

    def _cut(self, k: int, nbytes: int) -> HostPiece:
        begin, size = self._free[k]
        self._free[k : k + 1] = [(begin + nbytes, size - nbytes)] * (size > nbytes)
        self._in_use += nbytes
        return HostPiece(self, begin, nbytes)

    def give_back(self, begin: int, nbytes: int) -> None:
        """Return a range.

        Takes no lock: the garbage collector may call this at any moment, even during `take`.
        """
        self._returned.append((begin, nbytes))

    def _merge_returned(self) -> None:
        while self._returned:
            begin, nbytes = self._returned.popleft()
            self._in_use -= nbytes
            insort(self._free, (begin, nbytes))
            self._free = _merged(self._free)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of parts."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _merged(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges, with adjacent ones merged."""
    merged = free[:1]
    for begin, size in free[1:]:
        last_begin, last_size = merged[-1]
        if last_begin + last_size == begin:
            merged[-1] = last_begin, last_size + size
        else:
            merged.append((begin, size))
    return merged


def _mapped(nbytes: int, *advice: int | None) -> torch.Tensor:
    """Memory that PyTorch has not allocated, so that the CPU's meter does not count it."""
    try:
        memory = mmap.mmap(-1, nbytes, **_PRIVATE)
    except (OSError, ValueError) as error:
        raise PinningError(f"the system has no {nbytes} bytes: {error}") from None
    for piece in advice:
        if piece is not None:
            with suppress(OSError):  # a kernel without it
                memory.madvise(piece)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that the system never swaps, so that copies run while the device computes.

    While CUDA allocates or pins memory, it launches no kernels. So the pages are made before CUDA
    pins them: on an H200's host it then launched nothing for 24 ms per GiB instead of 400 ms.
    """
    free = free_host_bytes()
    if free < nbytes:
        raise ShortageError(f"only {text_of(max(0, free))} of host memory are free")
    memory = _mapped(nbytes, _HUGE_PAGES, _WIPE_ON_FORK)
    memory[:: mmap.PAGESIZE].zero_()
    pin(memory, device)
    return memory


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Pin a tensor's pages; raises a PinningError if CUDA refuses."""
    try:
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except (AssertionError, AttributeError, RuntimeError) as problem:  # there is no such call
        raise PinningError(f"memory cannot be pinned: {problem}") from None
    if not error:
        return
    with suppress(RuntimeError):  # CUDA remembers the error, and the next launch would report it
        torch.zeros(1, device=device)
    raise PinningError(f"cudaHostRegister failed with error {error}")


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Return a tensor's pinned pages to the system, once no copy uses them any more."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
