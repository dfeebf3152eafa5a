"""The arena: host memory for activations, pinned if a device copies to it.

Pinning takes time (on an H200's host a fifth of a second for each GiB). So the arena keeps the
memory it has, and grows in the background to the size that plans ask for. It hands out any number
of bytes, never exceeds its limit, and returns everything to the system on `close`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from mimose.memory.host_segment import (
    HostPiece,
    HostSegment,
    PinningError,
    ShortageError,
    aligned,
)

_SEGMENT = 128 << 20
"""The bytes that are pinned at once in the background. CUDA launched nothing for 3 ms of that on an
H200's host, which the work queued on the device covers."""
_SHORTAGE_SECONDS = 10.0


class HostRange:
    """Bytes of the arena, given back when the last reference to this object goes.

    They may lie in several pieces, so that small free ranges can be used too. Reusing the bytes is
    safe: the next copy into them runs on the same copy stream, after any copy that reads them.
    """

    __slots__ = ("__weakref__", "_parts", "nbytes")

    def __init__(self, parts: Sequence[HostPiece], nbytes: int) -> None:
        self._parts, self.nbytes = parts, nbytes

    @property
    def pieces(self) -> list[HostPiece]:
        """The contiguous pieces of these bytes, without the padding for alignment."""
        left, pieces = self.nbytes, []
        for part in self._parts:
            pieces.append(part._replace(nbytes=min(left, part.nbytes)))
            left -= part.nbytes
        return pieces

    def __del__(self) -> None:
        for part in self._parts:
            part.segment.give_back(part.begin, part.nbytes)


class HostArena:
    """Hands out host memory up to a limit."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes = limit_bytes
        self._device = device
        self.slow = device.type == "cuda"
        """Whether growing takes so long that training should not wait for it."""
        self._segments: list[HostSegment] = []
        self._growth: _Growth | None = None
        self._short_until = 0.0
        """Until when not to ask for more, because too little was free."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the arena holds, in use or free."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def in_use_bytes(self) -> int:
        return sum(segment.in_use for segment in self._segments)

    def prepare(self, nbytes: int) -> None:
        """Grow to this many bytes in the background, if the limit allows it.

        Raises a PinningError if the system refused memory the last time. If too little was free,
        that is tried again after a while.
        """
        growth = self._growth
        if growth is not None:
            if growth.is_alive():
                return
            self._growth = None
            if growth.found_shortage:
                self._short_until = time.monotonic() + _SHORTAGE_SECONDS
            else:
                growth.raise_problem()
        if self.held_bytes < nbytes <= self.limit_bytes and time.monotonic() >= self._short_until:
            sizes = _segment_sizes(self._missing(nbytes))
            self._growth = _Growth(self._segments, list(sizes), self._device)
            self._growth.start()

    def reserve(self, nbytes: int) -> bool:
        """Grow to this many bytes now. Returns False if that exceeds the limit or what is free.

        Raises a PinningError if the system refuses.
        """
        if nbytes > self.limit_bytes:
            return False
        self._finish_growing()
        if nbytes <= self.held_bytes:
            return True
        for missing in (self._missing(nbytes), nbytes - self.held_bytes):
            with suppress(ShortageError):
                self._segments.append(HostSegment(missing, self._device))
                return True
        return False

    def _missing(self, nbytes: int) -> int:
        """Bytes to add to hold `nbytes` and an eighth more: the next plan often needs more."""
        return min(nbytes + nbytes // 8, self.limit_bytes) - self.held_bytes

    def _finish_growing(self) -> None:
        growth, self._growth = self._growth, None
        # The garbage collector may close the arena of a dead model in any thread.
        if growth is not None and growth is not threading.current_thread():
            growth.join()

    def take(self, nbytes: int) -> HostRange | None:
        """A range of this many bytes; None if the limit or the system does not allow it."""
        needed = aligned(max(1, nbytes))
        for segment in list(self._segments):
            part = segment.take(needed)
            if part is not None:
                return HostRange((part,), nbytes)
        if nbytes <= self.held_bytes - self.in_use_bytes:  # pinning more would take far longer
            return self._take_scattered(nbytes)
        self._finish_growing()
        left = self.limit_bytes - self.held_bytes
        if needed <= left and self._grow(min(max(needed, _SEGMENT), left)):
            part = self._segments[-1].take(needed)
            assert part is not None
            return HostRange((part,), nbytes)
        return self._take_scattered(nbytes)

    def _take_scattered(self, nbytes: int) -> HostRange | None:
        """A range made of several free pieces, after growing by what is missing."""
        missing = nbytes - (self.held_bytes - self.in_use_bytes)
        if missing > self.limit_bytes - self.held_bytes or (
            missing > 0 and not self._grow(missing)
        ):
            return None
        parts: list[HostPiece] = []
        left = nbytes
        for segment in self._segments:
            while left > 0 and (part := segment.take_largest(left)) is not None:
                parts.append(part)
                left -= part.nbytes
        return HostRange(parts, nbytes)

    def _grow(self, nbytes: int) -> bool:
        """Add a segment of this many bytes. Returns False if the system refuses."""
        try:
            self._segments.append(HostSegment(nbytes, self._device))
        except PinningError:
            return False
        return True

    def close(self) -> None:
        """Return all memory to the system for good; ranges in use follow when they are dropped."""
        if self._growth is not None:
            self._growth.stop()
        self._finish_growing()
        self._segments, self.limit_bytes = [], 0


class _Growth(threading.Thread):
    """Adds segments to an arena in the background."""

    def __init__(
        self, segments: list[HostSegment], sizes: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(name="mimose-pinning", daemon=True)
        self._segments, self._sizes, self._device = segments, sizes, device
        self._stopped = False
        self._problem: PinningError | None = None

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        for size in self._sizes:
            if self._stopped:
                return
            try:
                segment = HostSegment(size, self._device)
            except PinningError as problem:
                self._problem = problem
                return
            if not self._stopped:
                self._segments.append(segment)

    @property
    def found_shortage(self) -> bool:
        """Whether it ended because too little memory was free."""
        return isinstance(self._problem, ShortageError)

    def stop(self) -> None:
        """Add no segment after the one that is being pinned."""
        self._stopped = True

    def raise_problem(self) -> None:
        """Raise the error that ended the growth, if there was one."""
        if self._problem is not None:
            raise self._problem


def _segment_sizes(nbytes: int) -> Iterator[int]:
    """The sizes of segments that hold this many bytes."""
    while nbytes > 0:
        yield min(nbytes, _SEGMENT)
        nbytes -= _SEGMENT
