"""How much memory is in use: the only file that queries a device about memory.

On CUDA this reads the allocator's statistics. A CPU has no such statistics, so mimose counts live
tensor storages there. A budget then means the same, and the library can be tried without a GPU.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from mimose.errors import ConflictError
from mimose.memory.allocator import allocator_backend, current_settings, page_bytes_in
from mimose.memory.host_limit import physical_bytes
from mimose.memory.storage_counter import StorageCounter

_PAGES_LOST = 5.6
"""How many pages' worth of memory may lie unused in partly filled pages."""
_SMALL_PAGE_BYTES = 2 << 20
"""The allocator rounds large tensors to this size, and it is the page size for small ones."""


class Reading(NamedTuple):
    """Bytes at one moment; peaks since the last `reset_peak`."""

    in_use: int
    peak: int
    held: int
    """What the allocator has reserved on the device, cached memory included."""
    peak_held: int
    retries: int = 0
    """How often the allocator had to free cached memory to serve a request."""
    failures: int = 0
    """How often it still ran out of memory."""


class Meter(ABC):
    """Reads the memory of one device."""

    device_bytes: int
    private = False
    """Whether only mimose reads these peaks, so that it may reset them at any time."""
    fragments = False
    """Whether batches of varying size fragment the memory, given the allocator's settings."""
    page_bytes = 0
    """The page size in which the allocator maps and unmaps memory for large tensors."""
    hole_bytes = 0
    """How much may lie unused in partly filled pages, whatever the budget."""
    overshoot_bytes = 0
    """By how much the allocator may exceed a limit."""

    def read(self) -> Reading:
        return self._peaks.merged_with(self._read())

    def reset_peak(self) -> None:
        """Let peaks count from now on."""
        self._peaks.before_reset(self._read)
        self._reset()

    def read_and_reset(self) -> Reading:
        """Both at once: with other meters on the device, resetting reads as well."""
        raw = self._read()
        reading = self._peaks.merged_with(raw)
        self._peaks.before_reset(lambda: raw)
        self._reset()
        return reading

    _peaks: SharedPeaks

    @abstractmethod
    def _read(self) -> Reading:
        """The device's reading, with peaks since any meter was reset."""

    @abstractmethod
    def _reset(self) -> None:
        """Reset the device's peaks, for all meters."""

    @abstractmethod
    def free_bytes(self) -> int:
        """What any process could still allocate on the device."""

    @abstractmethod
    def limit(self, number_of_bytes: int | None) -> None:
        """Limit what this process may reserve; None removes the limit."""

    def lost_bytes(self) -> int | None:
        """Free memory in partly filled pages, which cannot be unmapped; None if unknown."""
        return 0

    def release_cached(self) -> None:  # noqa: B027 (only CUDA has a cache)
        """Return cached memory to the device."""

    def close(self) -> None:  # noqa: B027 (overridden by meters with state to release)
        """Stop counting."""


def meter_for(device: torch.device) -> Meter:
    """The meter of a device."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return CpuMeter()
    raise ConflictError(
        f"the model is on {device}: mimose can read the memory of CUDA devices and, for trials, of "
        "the CPU. mimose.checkpoint works on every device"
    )


class SharedPeaks:
    """One meter's peaks, where all meters of a device reset the same statistics.

    Before one meter resets them, all others store the peak until then.
    """

    _by_device: ClassVar[dict[str, weakref.WeakSet[SharedPeaks]]] = {}

    def __init__(self, device: str) -> None:
        self._all = self._by_device.setdefault(device, weakref.WeakSet())
        self._all.add(self)
        self._in_use = self._held = 0

    def merged_with(self, reading: Reading) -> Reading:
        """A reading whose peaks include those before resets by other meters."""
        if reading.peak >= self._in_use and reading.peak_held >= self._held:
            return reading
        peak, peak_held = max(reading.peak, self._in_use), max(reading.peak_held, self._held)
        return reading._replace(peak=peak, peak_held=peak_held)

    def before_reset(self, read: Callable[[], Reading]) -> None:
        """Store the current peaks for the other meters; forget this meter's."""
        self._in_use = self._held = 0
        if len(self._all) == 1:
            return
        now = read()
        for other in self._all:
            if other is not self:
                other._in_use = max(other._in_use, now.peak)
                other._held = max(other._held, now.peak_held)

    def close(self) -> None:
        self._all.discard(self)


class CudaMeter(Meter):
    """Reads the caching allocator's raw statistics, the cheapest call that has them."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.device_bytes = torch.cuda.get_device_properties(self._index).total_memory
        self._fraction_before: float | None = None
        self._peaks = SharedPeaks(f"cuda:{self._index}")
        settings = current_settings()
        fixed_segments = bool(settings) and not settings.get("expandable_segments", False)
        self.fragments = fixed_segments or allocator_backend() != "native"
        self.page_bytes = page_bytes_in(str(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")))
        self.hole_bytes = int(_PAGES_LOST * self.page_bytes)
        # The allocator compares the requested size with the limit, then maps whole pages.
        self.overshoot_bytes = self.page_bytes - _SMALL_PAGE_BYTES

    def _read(self) -> Reading:
        statistics: Any = torch._C._cuda_memoryStats(self._index)
        in_use = statistics["allocated_bytes"]["all"]
        held = statistics["reserved_bytes"]["all"]
        return Reading(
            in_use["current"],
            in_use["peak"],
            held["current"],
            held["peak"],
            statistics["num_alloc_retries"],
            statistics["num_ooms"],
        )

    def _reset(self) -> None:
        torch._C._cuda_resetPeakMemoryStats(self._index)

    def close(self) -> None:
        self._peaks.close()

    def lost_bytes(self) -> int | None:
        if self.fragments:  # what can be freed then depends on later requests
            return None
        try:
            segments = torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:  # before PyTorch 2.12
            segments = torch.cuda.memory_snapshot()
        return lost_in((s for s in segments if s["device"] == self._index), self.page_bytes)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._index)
        return int(free)

    def limit(self, number_of_bytes: int | None) -> None:
        if number_of_bytes is None:
            fraction, self._fraction_before = self._fraction_before, None
        else:
            if self._fraction_before is None:
                former = torch.cuda.get_per_process_memory_fraction(self._index)
                self._fraction_before = min(1.0, former)  # another backend has its own "no limit"
            fraction = min(1.0, number_of_bytes / self.device_bytes)
        if fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction, self._index)


def lost_in(segments: Iterable[Mapping[str, Any]], page_bytes: int) -> int:
    """Free bytes that fill no whole page: only whole pages can be unmapped."""
    lost = 0
    for segment in segments:
        page = page_bytes if segment["segment_type"] == "large" else _SMALL_PAGE_BYTES
        begin = 0
        for block in segment["blocks"]:
            end = begin + block["size"]
            if block["state"] == "inactive":
                whole = max(0, end // page * page - -(-begin // page) * page)
                lost += end - begin - whole
            begin = end
    return lost


class CpuMeter(Meter):
    """Counts the bytes of live tensor storages on the CPU, exactly."""

    private = True

    def __init__(self) -> None:
        self._counter = StorageCounter.shared()
        self._peaks = SharedPeaks("cpu")
        self.device_bytes = physical_bytes()
        self._open = True

    def _read(self) -> Reading:
        counter = self._counter
        counter.update_gathered()
        in_use, peak = counter.in_use, counter.peak
        return Reading(in_use, peak, in_use, peak, 0, counter.failures)

    def _reset(self) -> None:
        self._counter.peak = self._counter.in_use

    def free_bytes(self) -> int:
        return max(0, self.device_bytes - self._counter.in_use)

    def limit(self, number_of_bytes: int | None) -> None:
        self._counter.set_limit(id(self), number_of_bytes)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.limit(None)
            self._peaks.close()
            self._counter.release()
