"""Copy storages to host memory and back, beside the device's other work.

A copy is a small state machine:

    LEAVING ──release──▶ AWAY ──fetch──▶ RETURNING ──storage──▶ BACK

- LEAVING: the copy to the host is queued on the copy stream, behind everything that the compute
  stream had been given by then. The device's storage is still there, and may be used.
- AWAY: the compute stream waits for that copy, and only then is the storage dropped. Whoever gets
  its memory next runs on the compute stream, so after the wait: no `record_stream`, which would
  make it depend on the device's progress when memory becomes free.
- RETURNING: the destination was allocated on the compute stream. Earlier work there may still use
  that memory, so the copy stream waits for it before it writes.
- BACK: the compute stream waits for the copy back, and may use the storage.

Copies of one block are queued together: the streams wait for each other once, and not for every
storage, which would take the host longer than a short block runs.

There is one copy stream for each device, for good: each new stream would get a memory pool of its
own. The compute stream is asked for at each use, outside of the copy stream's context. A copy that
is dropped while bytes are under way makes the compute stream wait for them first, since its memory
is about to be used by others.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from typing import Any, NamedTuple

import torch

from mimose.memory.host_arena import HostArena, HostRange

_REMEMBERED = 256
"""So many copies wait for their times to be read; then the oldest are forgotten."""


class CopyState(Enum):
    """Where the bytes of a copied storage are."""

    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"
    BACK = "back"


class CopyTimes(NamedTuple):
    """What has been measured of the copies since the last time that it was asked for."""

    to_host: list[tuple[int, float]]
    """Bytes and seconds of each copy."""
    from_host: list[tuple[int, float]]
    stalled_seconds: float
    """Time that the compute stream waited for copies."""


class CopyStream(ABC):
    """Carries copies out, in the order in which they are queued."""

    @abstractmethod
    def to_host(self, storage: torch.UntypedStorage, place: HostRange) -> Any:
        """Queue a copy to the host; returns what tells that it is done."""

    @abstractmethod
    def from_host(self, place: HostRange, device: torch.device) -> tuple[Any, Any]:
        """Queue a copy into new memory; returns the storage, and what tells that it is done."""

    @abstractmethod
    def wait(self, done: Any) -> None:
        """Let the compute stream go on only after a copy is done."""

    def together(self) -> AbstractContextManager[None]:
        """Queue all copies that are asked for in this context at its end, as one."""
        return nullcontext()

    def abandon(self, done: Any) -> None:  # noqa: B027 (only a device has streams)
        """A copy is of no use any more: its memory goes back to the stream that it came from, so
        that one waits."""

    @abstractmethod
    def times(self) -> CopyTimes:
        """What is known of the copies since the last call, without waiting for any."""

    def synchronize(self) -> None:  # noqa: B027 (only a device has a queue)
        """Wait until every copy is done."""


class HostCopy:
    """One storage whose bytes leave the device and come back."""

    __slots__ = ("__weakref__", "_device", "_done", "_place", "_storage", "_stream", "state")

    def __init__(self, storage: torch.UntypedStorage, place: HostRange, stream: CopyStream) -> None:
        self._stream, self._place, self._device = stream, place, storage.device
        self._storage: torch.UntypedStorage | None = storage
        self._done = stream.to_host(storage, place)
        self.state = CopyState.LEAVING

    @property
    def nbytes(self) -> int:
        return self._place.nbytes

    def release(self) -> None:
        """Drop the storage on the device; the bytes are on the host from now on."""
        if self.state is CopyState.LEAVING:
            self._stream.wait(self._done)
            self._storage, self._done, self.state = None, None, CopyState.AWAY

    def fetch(self) -> None:
        """Begin to bring the bytes back, if they are away."""
        if self.state is CopyState.AWAY:
            self._storage, self._done = self._stream.from_host(self._place, self._device)
            self.state = CopyState.RETURNING

    def storage(self) -> torch.UntypedStorage:
        """The bytes on the device, for the compute stream; fetched now if they are away."""
        self.fetch()
        if self.state is CopyState.RETURNING:
            self._stream.wait(self._done)
            self._done, self.state = None, CopyState.BACK
        assert self._storage is not None
        return self._storage

    def __del__(self) -> None:
        if getattr(self, "_done", None) is not None:
            self._stream.abandon(self._done)


class CpuCopies(CopyStream):
    """Copies at once, into memory that the CPU's meter does not count. For trying things out."""

    def to_host(self, storage: torch.UntypedStorage, place: HostRange) -> Any:
        address = storage.data_ptr()
        for piece in place.pieces:
            ctypes.memmove(piece.address, address, piece.nbytes)
            address += piece.nbytes
        return True

    def from_host(self, place: HostRange, device: torch.device) -> tuple[Any, Any]:
        storage = torch.empty(place.nbytes, dtype=torch.uint8, device=device).untyped_storage()
        address = storage.data_ptr()
        for piece in place.pieces:
            ctypes.memmove(address, piece.address, piece.nbytes)
            address += piece.nbytes
        return storage, True

    def wait(self, done: Any) -> None:
        pass

    def times(self) -> CopyTimes:
        return CopyTimes([], [], 0.0)


class _Queued:
    """Copies one way that are in the queue of the copy stream, or about to be."""

    __slots__ = ("compute", "done", "nbytes", "pairs", "to_host", "waited")

    def __init__(self, compute: torch.cuda.Stream, *, to_host: bool) -> None:
        self.compute = compute
        """The stream that their memory on the device belongs to."""
        self.to_host = to_host
        self.nbytes = 0
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Targets and sources of what is not in the queue yet."""
        self.done: Any = None
        self.waited: set[int] = set()
        """The streams that wait for them."""

    def add(self, on_device: torch.Tensor, place: HostRange) -> None:
        pieces = place.pieces
        parts = [on_device] if len(pieces) == 1 else on_device.split([p.nbytes for p in pieces])
        for part, piece in zip(parts, pieces, strict=True):
            self.pairs.append((piece.tensor, part) if self.to_host else (part, piece.tensor))
        self.nbytes += place.nbytes


class CudaCopies(CopyStream):
    """Copies on a stream of its own, timed by events."""

    _streams: dict[int, torch.cuda.Stream] = {}  # noqa: RUF012 (one for each device, for good)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        if self._index not in self._streams:
            self._streams[self._index] = torch.cuda.Stream(device)
        self._stream = self._streams[self._index]
        self._is_together = False
        self._together: _Queued | None = None
        """What waits for the end of `together`."""
        self._copies: deque[tuple[bool, int, Any, Any]] = deque(maxlen=_REMEMBERED)
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=_REMEMBERED)

    @contextmanager
    def together(self) -> Iterator[None]:
        self._is_together = True
        try:
            yield
        finally:
            queued, self._together, self._is_together = self._together, None, False
            if queued is not None:
                self._queue(queued)

    def to_host(self, storage: torch.UntypedStorage, place: HostRange) -> Any:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._add(source, place, to_host=True)

    def from_host(self, place: HostRange, device: torch.device) -> tuple[Any, Any]:
        target = torch.empty(place.nbytes, dtype=torch.uint8, device=device)
        return target.untyped_storage(), self._add(target, place, to_host=False)

    def _add(self, on_device: torch.Tensor, place: HostRange, *, to_host: bool) -> _Queued:
        queued = self._together
        if queued is None or queued.to_host is not to_host:
            if queued is not None:
                self._queue(queued)
            queued = _Queued(torch.cuda.current_stream(self._device), to_host=to_host)
            self._together = queued if self._is_together else None
        queued.add(on_device, place)
        if not self._is_together:
            self._queue(queued)
        return queued

    def _queue(self, queued: _Queued) -> None:
        """Carry copies out behind everything that the compute stream was given by now."""
        begun, queued.done = _timed_event(), _timed_event()
        self._stream.wait_event(queued.compute.record_event())
        with torch.cuda.stream(self._stream):
            begun.record(self._stream)
            for target, source in queued.pairs:
                target.copy_(source, non_blocking=True)
            queued.done.record(self._stream)
        queued.pairs.clear()
        self._copies.append((queued.to_host, queued.nbytes, begun, queued.done))

    def wait(self, done: _Queued) -> None:
        stream = _raw_stream(self._index)
        if stream in done.waited:
            return
        done.waited.add(stream)
        compute, arrived = torch.cuda.current_stream(self._device), _timed_event()
        arrived.record(compute)
        compute.wait_event(done.done)
        self._waits.append((arrived, done.done))

    def abandon(self, done: _Queued) -> None:
        if done.done is None or done.compute.cuda_stream in done.waited:
            return
        with suppress(RuntimeError):  # at the end of the process CUDA may be gone
            done.compute.wait_event(done.done)
            done.waited.add(done.compute.cuda_stream)

    def times(self) -> CopyTimes:
        away: list[tuple[int, float]] = []
        back: list[tuple[int, float]] = []
        while self._copies and self._copies[0][3].query():
            to_host, nbytes, begun, done = self._copies.popleft()
            (away if to_host else back).append((nbytes, begun.elapsed_time(done) / 1e3))
        stalled = 0.0
        while self._waits and self._waits[0][0].query() and self._waits[0][1].query():
            arrived, done = self._waits.popleft()
            stalled += max(0.0, arrived.elapsed_time(done) / 1e3)
        return CopyTimes(away, back, stalled)

    def synchronize(self) -> None:
        self._stream.synchronize()


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
"""The present compute stream, as a number. A `Stream` object takes tens of microseconds."""


class HostMemory:
    """A device's way to host memory: the arena, and the stream that copies to it."""

    def __init__(
        self, device: torch.device, limit_bytes: int, smallest_bytes: int | None = None
    ) -> None:
        on_cuda = device.type == "cuda"
        self.device = device
        self.arena = HostArena(limit_bytes, pinned=on_cuda)
        self.stream: CopyStream = CudaCopies(device) if on_cuda else CpuCopies()
        if smallest_bytes is None:
            smallest_bytes = _SMALLEST if on_cuda else 0
        self.smallest_bytes = smallest_bytes
        """Smaller storages stay on the device: queueing their copies takes longer than they do."""
        self.moved_bytes = 0
        """Bytes that have left the device so far."""

    def copy(self, storage: torch.UntypedStorage) -> HostCopy | None:
        """Begin to copy a storage to the host; None if there is no room for it."""
        place = self.arena.take(storage.nbytes())
        if place is None:
            return None
        self.moved_bytes += place.nbytes
        return HostCopy(storage, place, self.stream)

    def close(self) -> None:
        """Give all host memory back; copies under way end first."""
        self.stream.synchronize()
        self.arena.close()


_SMALLEST = 64 << 10
