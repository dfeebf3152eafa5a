"""One piece of host memory from the system, and the parts of it that the arena hands out."""

from __future__ import annotations

import mmap
import threading
from bisect import insort
from collections import deque
from typing import NamedTuple

import torch

ALIGNMENT = 512
"""Parts start and end at multiples of this many bytes."""


class PinningError(Exception):
    """The system did not provide host memory."""


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

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.tensor = _pinned(nbytes) if pinned else _mapped(nbytes)
        self.address = self.tensor.data_ptr()
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


def _mapped(nbytes: int) -> torch.Tensor:
    """Memory that PyTorch has not allocated, so that the CPU's meter does not count it."""
    try:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise PinningError(f"the system has no {nbytes} bytes: {error}") from None


def _pinned(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise PinningError(str(error).splitlines()[0]) from None
