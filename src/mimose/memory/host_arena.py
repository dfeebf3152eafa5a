"""Host memory for activations: one arena, addressed in bytes, pinned where a device copies to it.

Pinning memory takes milliseconds, so the arena keeps what it has and grows to what plans need. It
serves any number of bytes, never grows beyond its limit, and gives everything back on `close`. The
memory is mapped from the system directly: PyTorch's own pinned memory is rounded up to powers of
two and stays cached in the process.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import insort
from contextlib import suppress

import torch

_ALIGNMENT = 512
_SMALLEST_SEGMENT = 32 << 20
"""Mapping and pinning less than this at a time costs more calls than it saves memory."""


class PinningError(Exception):
    """The system did not pin host memory."""


class HostRange:
    """Bytes of the arena; they return to it with the last reference to this object.

    The next user writes to them on the same copy stream, so after whatever still reads them.
    """

    __slots__ = ("__weakref__", "_begin", "_segment", "_taken", "nbytes")

    def __init__(self, segment: _Segment, begin: int, nbytes: int, taken: int) -> None:
        self._segment, self._begin = segment, begin
        self.nbytes, self._taken = nbytes, taken

    @property
    def address(self) -> int:
        return self._segment.address + self._begin

    @property
    def tensor(self) -> torch.Tensor:
        """These bytes as a tensor on the CPU."""
        return self._segment.tensor[self._begin : self._begin + self.nbytes]

    def __del__(self) -> None:
        self._segment.give_back(self._begin, self._taken)


class HostArena:
    """Hands out host memory up to a limit."""

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self.limit_bytes = limit_bytes
        self._pinned = pinned
        self._segments: list[_Segment] = []

    @property
    def held_bytes(self) -> int:
        """What the arena has mapped."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def in_use_bytes(self) -> int:
        return sum(segment.in_use for segment in self._segments)

    def reserve(self, nbytes: int) -> bool:
        """Grow to so many bytes in one piece, as long as nothing is in use; whether they are there.

        Raises a PinningError if the system refuses.
        """
        if nbytes > self.limit_bytes:
            return False
        if self.held_bytes < nbytes and not self.in_use_bytes:
            larger = nbytes + nbytes // 8  # the next plan often needs a little more
            self.close()
            self._segments = [_Segment(min(larger, self.limit_bytes), pinned=self._pinned)]
        return True

    def take(self, nbytes: int) -> HostRange | None:
        """So many bytes; None if the limit does not allow it, or the system refuses."""
        needed = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
        for segment in self._segments:
            begin = segment.take(needed)
            if begin is not None:
                return HostRange(segment, begin, nbytes, needed)
        left = self.limit_bytes - self.held_bytes
        if needed > left:
            return None
        size = min(left, max(needed, self.held_bytes // 4, _SMALLEST_SEGMENT))
        try:
            segment = _Segment(size, pinned=self._pinned)
        except PinningError:
            return None
        self._segments.append(segment)
        begin = segment.take(needed)
        assert begin is not None
        return HostRange(segment, begin, nbytes, needed)

    def close(self) -> None:
        """Give everything back to the system; what is still in use, with its last user."""
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.close()


class _Segment:
    """One mapping of the system, handed out in pieces, first fit."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        try:
            self._memory = mmap.mmap(-1, nbytes)
        except (OSError, ValueError) as error:
            raise PinningError(f"the system has no {nbytes} bytes: {error}") from None
        with suppress(AttributeError, OSError):  # larger pages are pinned faster, where there are
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        self._lock = threading.Lock()
        self._pinned = self._closed = False
        self.in_use = 0
        if pinned:
            _pin(self.address, self.nbytes)
            self._pinned = True

    def take(self, nbytes: int) -> int | None:
        with self._lock:
            for k, (begin, size) in enumerate(self._free):
                if size >= nbytes:
                    self._free[k : k + 1] = [(begin + nbytes, size - nbytes)] * (size > nbytes)
                    self.in_use += nbytes
                    return begin
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        with self._lock:
            self.in_use -= nbytes
            insort(self._free, (begin, nbytes))
            self._free = _joined(self._free)
            last = self._closed and not self.in_use
        if last:
            self._unpin()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            unused = not self.in_use
        if unused:
            self._unpin()

    def _unpin(self) -> None:
        """The mapping itself goes with the last reference to it."""
        if self._pinned:
            self._pinned = False
            _unpin(self.address)


def _joined(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring ranges as one."""
    joined = free[:1]
    for begin, size in free[1:]:
        last_begin, last_size = joined[-1]
        if last_begin + last_size == begin:
            joined[-1] = last_begin, last_size + size
        else:
            joined.append((begin, size))
    return joined


def _pin(address: int, nbytes: int) -> None:
    try:
        error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    except (RuntimeError, AttributeError) as problem:
        raise PinningError(str(problem)) from None
    if error:
        raise PinningError(f"cudaHostRegister of {nbytes} bytes failed with error {error}")


def _unpin(address: int) -> None:
    with suppress(RuntimeError, AttributeError):  # at the end of the process CUDA may be gone
        torch.cuda.synchronize()  # nothing may still be copying
        torch.cuda.cudart().cudaHostUnregister(address)
