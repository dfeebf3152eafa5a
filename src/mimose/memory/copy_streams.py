"""Queues for copies between a device and host memory.

`CudaCopies` has one copy stream for each device for the life of the process, because each new
stream would get a memory pool of its own. The current compute stream is looked up at each use,
outside of the copy stream's context.

Copies of one block are queued together. Then the streams wait for each other once instead of once
for each storage, which would take the CPU longer than a short block runs.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch

from mimose.memory.host_arena import HostRange

_REMEMBERED = 256
"""The most copies whose times can wait to be read; older ones are forgotten."""


class CopyTimes(NamedTuple):
    """Measurements of the copies that have finished since the last reading."""

    to_host: list[tuple[int, float]]
    """Bytes and seconds of each copy."""
    from_host: list[tuple[int, float]]
    """Bytes and seconds of each copy."""
    stalled_seconds: float
    """Time that the compute stream waited for copies."""


class CopyStream(ABC):
    """Runs copies in the order in which they are queued."""

    @abstractmethod
    def to_host(self, storage: torch.UntypedStorage, host_range: HostRange) -> Any:
        """Queue a copy to the host. Returns a token for `wait` and `abandon`."""

    @abstractmethod
    def from_host(self, host_range: HostRange, device: torch.device) -> tuple[Any, Any]:
        """Queue a copy into a new storage on the device. Returns the storage and a token."""

    @abstractmethod
    def wait(self, copy: Any) -> None:
        """Make the compute stream wait for a copy."""

    def together(self) -> AbstractContextManager[None]:
        """A context that collects the copies requested in it, and queues them as one at its end."""
        return nullcontext()

    def abandon(self, copy: Any) -> None:  # noqa: B027 (only a device has streams)
        """The result of a copy is not needed any more.

        Its device memory returns to the stream that allocated it, so that stream waits for it.
        """

    @abstractmethod
    def times(self) -> CopyTimes:
        """The copies that finished since the last call. Does not wait for any."""

    def synchronize(self) -> None:  # noqa: B027 (only a device has a queue)
        """Wait until every copy has finished."""


class CpuCopies(CopyStream):
    """Copies immediately, into memory that the CPU's meter does not count. For trials on a CPU."""

    def to_host(self, storage: torch.UntypedStorage, host_range: HostRange) -> Any:
        address = storage.data_ptr()
        for piece in host_range.pieces:
            ctypes.memmove(piece.address, address, piece.nbytes)
            address += piece.nbytes
        return True

    def from_host(self, host_range: HostRange, device: torch.device) -> tuple[Any, Any]:
        storage = torch.empty(host_range.nbytes, dtype=torch.uint8, device=device).untyped_storage()
        address = storage.data_ptr()
        for piece in host_range.pieces:
            ctypes.memmove(address, piece.address, piece.nbytes)
            address += piece.nbytes
        return storage, True

    def wait(self, copy: Any) -> None:
        pass

    def times(self) -> CopyTimes:
        return CopyTimes([], [], 0.0)


class _CopyBatch:
    """Copies in one direction that are queued together."""

    __slots__ = ("compute", "done", "nbytes", "pairs", "to_host", "waiting")

    def __init__(self, compute: torch.cuda.Stream, *, to_host: bool) -> None:
        self.compute = compute
        """The compute stream, which owns their memory on the device."""
        self.to_host = to_host
        self.nbytes = 0
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Target and source of each copy that is not queued yet."""
        self.done: Any = None
        """The event after the last copy; None until they are queued."""
        self.waiting: set[int] = set()
        """The streams that wait for `done`."""

    def add(self, on_device: torch.Tensor, host_range: HostRange) -> None:
        pieces = host_range.pieces
        parts = [on_device] if len(pieces) == 1 else on_device.split([p.nbytes for p in pieces])
        for part, piece in zip(parts, pieces, strict=True):
            self.pairs.append((piece.tensor, part) if self.to_host else (part, piece.tensor))
        self.nbytes += host_range.nbytes


class CudaCopies(CopyStream):
    """Copies on a separate CUDA stream, timed by events."""

    _streams: dict[int, torch.cuda.Stream] = {}  # noqa: RUF012 (one for each device, for good)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        if self._index not in self._streams:
            self._streams[self._index] = torch.cuda.Stream(device)
        self._stream = self._streams[self._index]
        self._collecting = False
        self._open_batch: _CopyBatch | None = None
        """The batch to queue at the end of `together`."""
        self._copies: deque[tuple[bool, int, Any, Any]] = deque(maxlen=_REMEMBERED)
        """Each queued batch: whether it goes to the host, its bytes, begin and end events."""
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=_REMEMBERED)
        """Each wait of the compute stream: events at its begin, and at the end of the copies."""

    @contextmanager
    def together(self) -> Iterator[None]:
        self._collecting = True
        try:
            yield
        finally:
            batch, self._open_batch, self._collecting = self._open_batch, None, False
            if batch is not None:
                self._queue(batch)

    def to_host(self, storage: torch.UntypedStorage, host_range: HostRange) -> Any:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._add(source, host_range, to_host=True)

    def from_host(self, host_range: HostRange, device: torch.device) -> tuple[Any, Any]:
        target = torch.empty(host_range.nbytes, dtype=torch.uint8, device=device)
        return target.untyped_storage(), self._add(target, host_range, to_host=False)

    def _add(self, on_device: torch.Tensor, host_range: HostRange, *, to_host: bool) -> _CopyBatch:
        batch = self._open_batch
        if batch is None or batch.to_host is not to_host:
            if batch is not None:
                self._queue(batch)
            batch = _CopyBatch(torch.cuda.current_stream(self._device), to_host=to_host)
            self._open_batch = batch if self._collecting else None
        batch.add(on_device, host_range)
        if not self._collecting:
            self._queue(batch)
        return batch

    def _queue(self, batch: _CopyBatch) -> None:
        """Queue the copies behind all work that the compute stream has now."""
        begun, batch.done = _timed_event(), _timed_event()
        self._stream.wait_event(batch.compute.record_event())
        with torch.cuda.stream(self._stream):
            begun.record(self._stream)
            for target, source in batch.pairs:
                target.copy_(source, non_blocking=True)
            batch.done.record(self._stream)
        batch.pairs.clear()
        self._copies.append((batch.to_host, batch.nbytes, begun, batch.done))

    def wait(self, copy: _CopyBatch) -> None:
        stream = _raw_stream(self._index)
        if stream in copy.waiting:
            return
        copy.waiting.add(stream)
        compute, arrived = torch.cuda.current_stream(self._device), _timed_event()
        arrived.record(compute)
        compute.wait_event(copy.done)
        self._waits.append((arrived, copy.done))

    def abandon(self, copy: _CopyBatch) -> None:
        if copy.done is None or copy.compute.cuda_stream in copy.waiting:
            return
        with suppress(RuntimeError):  # at the end of the process CUDA may be gone
            copy.compute.wait_event(copy.done)
            copy.waiting.add(copy.compute.cuda_stream)

    def times(self) -> CopyTimes:
        to_host: list[tuple[int, float]] = []
        from_host: list[tuple[int, float]] = []
        while self._copies and self._copies[0][3].query():
            is_to_host, nbytes, begun, done = self._copies.popleft()
            seconds = begun.elapsed_time(done) / 1e3
            (to_host if is_to_host else from_host).append((nbytes, seconds))
        stalled = 0.0
        while self._waits and self._waits[0][0].query() and self._waits[0][1].query():
            arrived, done = self._waits.popleft()
            stalled += max(0.0, arrived.elapsed_time(done) / 1e3)
        return CopyTimes(to_host, from_host, stalled)

    def synchronize(self) -> None:
        self._stream.synchronize()


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
"""The current compute stream's handle. Creating a `Stream` object takes tens of microseconds."""
