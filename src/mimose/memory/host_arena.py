"""Host memory for activations: one arena, addressed in bytes, pinned where a device copies to it.

Pinning memory takes long (an H200's host took a second for 1 to 2 GiB), so the arena keeps what it
has, and grows in the background to what plans would like to have. It serves any number of bytes,
never grows beyond its limit, and gives everything back on `close`. PyTorch rounds pinned memory up
to powers of two, so the arena asks for just such pieces.
"""

from __future__ import annotations

import mmap
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

_ALIGNMENT = 512
_SMALLEST_PIECE = 32 << 20
"""Pinning less than this at a time costs more calls than it saves memory."""
_PAUSE = 3.0
"""How long pinning in the background rests after each piece, as a multiple of the time that this
took. While CUDA pins memory it launches no kernels: an H200's host took 35 ms for a small piece,
which the device's queue covers if it comes seldom enough."""


class PinningError(Exception):
    """The system did not pin host memory."""


class HostRange:
    """Bytes of the arena; they return to it with the last reference to this object.

    They may lie in several places, so that no free byte is lost between others. The next user
    writes to them on the same copy stream, so after whatever still reads them.
    """

    __slots__ = ("__weakref__", "_parts", "nbytes")

    def __init__(self, parts: Sequence[HostPiece], nbytes: int) -> None:
        self._parts, self.nbytes = parts, nbytes

    @property
    def pieces(self) -> list[HostPiece]:
        """These bytes, one piece for each place."""
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

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self.limit_bytes = limit_bytes
        self._pinned = pinned
        self.slow = pinned
        """Whether growing takes so long that training should not wait for it."""
        self._segments: list[_Segment] = []
        self._growth: _Growth | None = None

    @property
    def held_bytes(self) -> int:
        """What the arena has mapped."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def in_use_bytes(self) -> int:
        return sum(segment.in_use for segment in self._segments)

    def prepare(self, nbytes: int) -> None:
        """Grow towards so many bytes in the background, if the limit allows it.

        Raises a PinningError if the system has refused what was asked for before.
        """
        growth = self._growth
        if growth is not None:
            if growth.is_alive():
                return
            self._growth = None
            growth.raise_problem()
        if self.held_bytes < nbytes <= self.limit_bytes:
            pieces = _pieces(self._missing(nbytes), _SMALLEST_PIECE)
            self._growth = _Growth(self._segments, list(pieces), self._pinned)
            self._growth.start()

    def reserve(self, nbytes: int) -> bool:
        """Grow to so many bytes now; whether the limit allows it.

        Raises a PinningError if the system refuses.
        """
        if nbytes > self.limit_bytes:
            return False
        self._finish_growing()
        if nbytes > self.held_bytes:
            for size in _pieces(self._missing(nbytes)):
                self._segments.append(_Segment(size, pinned=self._pinned))
        return True

    def _missing(self, nbytes: int) -> int:
        """What it takes to have so many bytes, and some more: the next plan often needs a little
        more."""
        return min(nbytes + nbytes // 8, self.limit_bytes) - self.held_bytes

    def _finish_growing(self) -> None:
        growth, self._growth = self._growth, None
        if growth is not None:
            growth.hurry()
            growth.join()

    def take(self, nbytes: int) -> HostRange | None:
        """So many bytes; None if the limit does not allow it, or the system refuses."""
        needed = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
        for segment in list(self._segments):
            part = segment.take(needed)
            if part is not None:
                return HostRange((part,), nbytes)
        self._finish_growing()
        left = self.limit_bytes - self.held_bytes
        size = max(1 << (needed - 1).bit_length(), _SMALLEST_PIECE)
        if needed <= left and self._grow(size if size <= left else needed):
            part = self._segments[-1].take(needed)
            assert part is not None
            return HostRange((part,), nbytes)
        return self._gather(nbytes)

    def _gather(self, nbytes: int) -> HostRange | None:
        """So many bytes from whatever is free, in several places."""
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
        """Whether the system gave so many bytes more."""
        try:
            self._segments.append(_Segment(nbytes, pinned=self._pinned))
        except PinningError:
            return False
        return True

    def close(self) -> None:
        """Give everything back to the system, for good; what is still in use, with its last
        user."""
        if self._growth is not None:
            self._growth.stop()
        self._finish_growing()
        self._segments, self.limit_bytes = [], 0
        if self._pinned:
            _empty_cache()


class _Growth(threading.Thread):
    """Adds pieces to an arena in the background."""

    def __init__(self, segments: list[_Segment], pieces: Sequence[int], pinned: bool) -> None:
        super().__init__(name="mimose-pinning", daemon=True)
        self._segments, self._pieces, self._pinned = segments, pieces, pinned
        self._device = torch.cuda.current_device() if pinned else None  # each thread has its own
        self._stopped = False
        self._awaited = threading.Event()
        self._problem: PinningError | None = None

    def run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        for size in self._pieces:
            if self._stopped:
                return
            began = time.monotonic()
            try:
                self._segments.append(_Segment(size, pinned=self._pinned))
            except PinningError as problem:
                self._problem = problem
                return
            self._awaited.wait(_PAUSE * (time.monotonic() - began))

    def hurry(self) -> None:
        """Rest no longer: someone waits."""
        self._awaited.set()

    def stop(self) -> None:
        """Add no more than the piece that is being pinned."""
        self._stopped = True

    def raise_problem(self) -> None:
        """Raise if the system has refused."""
        if self._problem is not None:
            raise self._problem


class HostPiece(NamedTuple):
    """Bytes in one place."""

    segment: _Segment
    begin: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.segment.address + self.begin

    @property
    def tensor(self) -> torch.Tensor:
        """These bytes as a tensor on the CPU."""
        return self.segment.tensor[self.begin : self.begin + self.nbytes]


class _Segment:
    """One piece of memory of the system, handed out in parts, first fit."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.tensor = _pinned(nbytes) if pinned else _mapped(nbytes)
        self.address = self.tensor.data_ptr()
        self._free: list[tuple[int, int]] = [(0, nbytes)]
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._in_use = 0

    @property
    def in_use(self) -> int:
        with self._lock:
            self._take_back()
            return self._in_use

    def take(self, nbytes: int) -> HostPiece | None:
        """So many bytes in one place, if they are free."""
        with self._lock:
            self._take_back()
            for k, (_, size) in enumerate(self._free):
                if size >= nbytes:
                    return self._cut(k, nbytes)
        return None

    def take_largest(self, most_bytes: int) -> HostPiece | None:
        """The largest place that is free, and no more than so many bytes of it."""
        most_bytes = -(-most_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._take_back()
            if not self._free:
                return None
            k, (_, size) = max(enumerate(self._free), key=lambda one: one[1][1])
            return self._cut(k, min(size, most_bytes))

    def _cut(self, k: int, nbytes: int) -> HostPiece:
        begin, size = self._free[k]
        self._free[k : k + 1] = [(begin + nbytes, size - nbytes)] * (size > nbytes)
        self._in_use += nbytes
        return HostPiece(self, begin, nbytes)

    def give_back(self, begin: int, nbytes: int) -> None:
        """These bytes are free again.

        Takes no lock: the garbage collector may come here at any moment, also from `take`.
        """
        self._returned.append((begin, nbytes))

    def _take_back(self) -> None:
        while self._returned:
            begin, nbytes = self._returned.popleft()
            self._in_use -= nbytes
            insort(self._free, (begin, nbytes))
            self._free = _joined(self._free)


def _pieces(nbytes: int, largest: int = 1 << 62) -> Iterator[int]:
    """Powers of two that add up to so many bytes, or hardly more; the rest in one piece."""
    while nbytes >= _SMALLEST_PIECE:
        size = min(1 << (nbytes.bit_length() - 1), largest)
        yield size
        nbytes -= size
    if nbytes > 0:
        yield nbytes


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


_empty_cache: Callable[[], None] = getattr(
    torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", lambda: None)
)
"""Gives pinned memory that PyTorch holds for nobody back to the system."""
