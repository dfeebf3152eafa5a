"""Copy storages to host memory and back while the device computes.

A copy is a small state machine:

    LEAVING ──release──▶ AWAY ──fetch──▶ RETURNING ──storage──▶ BACK

- LEAVING: the copy to the host is queued on the copy stream, behind all work that the compute
  stream had by then. The storage on the device still exists and may be used.
- AWAY: the compute stream waits for that copy, then the storage is dropped. Its memory is reused on
  the compute stream only, hence after the wait. So `record_stream` is not needed; with it, the time
  at which memory becomes free would depend on the device's progress.
- RETURNING: a new storage was allocated on the compute stream. Earlier work there may still use
  that memory, so the copy stream waits for it before it writes.
- BACK: the compute stream waits for the copy back, and may use the storage.

If a copy is dropped while its bytes are in flight, the compute stream waits for them first, since
its memory is about to be reused.
"""

from __future__ import annotations

from enum import Enum

import torch

from mimose.memory.copy_streams import CopyStream, CpuCopies, CudaCopies
from mimose.memory.host_arena import HostArena, HostRange

_SMALLEST_ON_CUDA = 64 << 10
"""Queueing the copy of a smaller storage takes longer than the copy itself."""


class CopyState(Enum):
    """Where the bytes of a copied storage are."""

    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"
    BACK = "back"


class HostCopy:
    """One storage whose bytes leave the device and come back."""

    __slots__ = ("__weakref__", "_copy", "_device", "_host_range", "_storage", "_stream", "state")

    def __init__(
        self, storage: torch.UntypedStorage, host_range: HostRange, stream: CopyStream
    ) -> None:
        self._stream, self._host_range, self._device = stream, host_range, storage.device
        self._storage: torch.UntypedStorage | None = storage
        self._copy = stream.to_host(storage, host_range)
        self.state = CopyState.LEAVING

    @property
    def nbytes(self) -> int:
        return self._host_range.nbytes

    def release(self) -> None:
        """Drop the storage on the device, once the copy to the host has finished."""
        if self.state is CopyState.LEAVING:
            self._stream.wait(self._copy)
            self._storage, self._copy, self.state = None, None, CopyState.AWAY

    def fetch(self) -> None:
        """Queue the copy back if the bytes are away."""
        if self.state is CopyState.AWAY:
            self._storage, self._copy = self._stream.from_host(self._host_range, self._device)
            self.state = CopyState.RETURNING

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device, ready for the compute stream; fetched now if it is away."""
        self.fetch()
        if self.state is CopyState.RETURNING:
            self._stream.wait(self._copy)
            self._copy, self.state = None, CopyState.BACK
        assert self._storage is not None
        return self._storage

    def __del__(self) -> None:
        if getattr(self, "_copy", None) is not None:
            self._stream.abandon(self._copy)


class HostMemory:
    """Host memory for one device: the arena, and the stream that copies to and from it."""

    def __init__(
        self, device: torch.device, limit_bytes: int, smallest_bytes: int | None = None
    ) -> None:
        on_cuda = device.type == "cuda"
        self.device = device
        self.arena = HostArena(limit_bytes, device)
        self.stream: CopyStream = CudaCopies(device) if on_cuda else CpuCopies()
        if smallest_bytes is None:
            smallest_bytes = _SMALLEST_ON_CUDA if on_cuda else 0
        self.smallest_bytes = smallest_bytes
        """Smaller storages stay on the device."""
        self.moved_bytes = 0
        """Bytes that have left the device so far."""

    def copy(self, storage: torch.UntypedStorage) -> HostCopy | None:
        """Queue the copy of a storage to the host; None if the arena has no room for it."""
        host_range = self.arena.take(storage.nbytes())
        if host_range is None:
            return None
        self.moved_bytes += host_range.nbytes
        return HostCopy(storage, host_range, self.stream)

    def close(self) -> None:
        """Return all host memory to the system, after copies in flight have finished."""
        self.stream.synchronize()
        self.arena.close()
