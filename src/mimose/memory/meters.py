"""How much memory is in use: the only file that asks a device about memory.

On CUDA the allocator's own statistics answer. On a CPU, where nobody counts, live tensor storages
are counted, so that a budget means the same and the whole library can be tried without a GPU.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from mimose.errors import ConflictError
from mimose.memory.allocator import allocator_backend, current_settings, page_bytes_in
from mimose.memory.storage_counter import StorageCounter

_HOLES = 5.6
"""How many of the allocator's pages may lie unused between tensors, in parts."""
_GRAIN = 2 << 20
"""What large tensors are rounded to, and the pages of small ones."""


class Reading(NamedTuple):
    """Bytes at one moment; peaks since the last `reset_peak`."""

    in_use: int
    peak: int
    held: int
    """What the allocator has taken from the device, cached memory included."""
    peak_held: int
    retries: int = 0
    """How often the allocator had to give cached memory back before it could go on."""
    failures: int = 0
    """How often it ran out of memory all the same."""


class Meter(ABC):
    """Reads one device's memory."""

    device_bytes: int
    private = False
    """Whether nobody else reads these peaks, so that they may be reset at any time."""
    fragments = False
    """Whether the allocator is set so that varying sizes leave fragments behind."""
    page_bytes = 0
    """The pages in which the allocator takes memory for large tensors, and gives it back."""
    hole_bytes = 0
    """What these may leave unused between tensors, whatever the budget."""
    overshoot_bytes = 0
    """By how much the allocator may run over a limit."""

    @abstractmethod
    def read(self) -> Reading: ...

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def free_bytes(self) -> int:
        """What anybody could still take."""

    @abstractmethod
    def limit(self, number_of_bytes: int | None) -> None:
        """Let this process hold no more than this; None lifts the limit."""

    def lost_bytes(self) -> int | None:
        """What lies free between tensors and cannot be given back now; None if nobody can tell."""
        return 0

    def release_cached(self) -> None:  # noqa: B027 (most have no cache)
        """Give memory that is held but not in use back to the device."""

    def close(self) -> None:  # noqa: B027 (most meters count nothing themselves)
        """Stop counting, where counting is this meter's own doing."""


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


class Peaks:
    """The peaks of one meter, where all meters of a device read and reset the same ones.

    A reset by one of them hides nothing from the others: each keeps what was the peak until then.
    """

    _of_device: ClassVar[dict[str, weakref.WeakSet[Peaks]]] = {}

    def __init__(self, device: str) -> None:
        self._all = self._of_device.setdefault(device, weakref.WeakSet())
        self._all.add(self)
        self._in_use = self._held = 0

    def added_to(self, reading: Reading) -> Reading:
        """A reading with the peaks before the resets of others."""
        if reading.peak >= self._in_use and reading.peak_held >= self._held:
            return reading
        peak, peak_held = max(reading.peak, self._in_use), max(reading.peak_held, self._held)
        return reading._replace(peak=peak, peak_held=peak_held)

    def before_reset(self, read: Callable[[], Reading]) -> None:
        """This meter is about to reset what all of them read."""
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
    """Reads the caching allocator's statistics, by the cheapest call there is."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.device_bytes = torch.cuda.get_device_properties(self._index).total_memory
        raw = getattr(torch._C, "_cuda_memoryStats", None)
        self._statistics = raw or torch.cuda.memory_stats_as_nested_dict
        reset = getattr(torch._C, "_cuda_resetPeakMemoryStats", None)
        self._reset = reset or torch.cuda.reset_peak_memory_stats
        self._former_share: float | None = None
        self._peaks = Peaks(f"cuda:{self._index}")
        settings = current_settings()
        fixed_segments = bool(settings) and not settings.get("expandable_segments", False)
        self.fragments = fixed_segments or allocator_backend() != "native"
        self.page_bytes = page_bytes_in(str(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")))
        self.hole_bytes = int(_HOLES * self.page_bytes)
        # A limit is held against the size asked for; pages are then taken as a whole.
        self.overshoot_bytes = self.page_bytes - _GRAIN

    def read(self) -> Reading:
        statistics = self._statistics(self._index)
        in_use = statistics["allocated_bytes"]["all"]
        held = statistics["reserved_bytes"]["all"]
        reading = Reading(
            in_use["current"],
            in_use["peak"],
            held["current"],
            held["peak"],
            statistics["num_alloc_retries"],
            statistics["num_ooms"],
        )
        return self._peaks.added_to(reading)

    def reset_peak(self) -> None:
        self._peaks.before_reset(self.read)
        self._reset(self._index)

    def close(self) -> None:
        self._peaks.close()

    def lost_bytes(self) -> int | None:
        if self.fragments:  # what it would give back depends on all that is asked for next
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
            if self._former_share is not None:
                torch.cuda.set_per_process_memory_fraction(self._former_share, self._index)
                self._former_share = None
            return
        if self._former_share is None:
            former = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
            self._former_share = former(self._index)
        share = min(1.0, number_of_bytes / self.device_bytes)
        torch.cuda.set_per_process_memory_fraction(share, self._index)


def lost_in(segments: Iterable[Mapping[str, Any]], page_bytes: int) -> int:
    """Bytes in free ranges that fill no whole page: only whole pages can be given back."""
    lost = 0
    for segment in segments:
        page = page_bytes if segment["segment_type"] == "large" else _GRAIN
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
        self._mode = StorageCounter.shared()
        self._peaks = Peaks("cpu")
        self.device_bytes = _physical_bytes()
        self._open = True

    def read(self) -> Reading:
        mode = self._mode
        mode.look_at_gathered()
        reading = Reading(mode.in_use, mode.peak, mode.in_use, mode.peak, 0, mode.failures)
        return self._peaks.added_to(reading)

    def reset_peak(self) -> None:
        self._peaks.before_reset(self.read)
        self._mode.peak = self._mode.in_use

    def free_bytes(self) -> int:
        return max(0, self.device_bytes - self._mode.in_use)

    def limit(self, number_of_bytes: int | None) -> None:
        self._mode.set_limit(id(self), number_of_bytes)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.limit(None)
            self._peaks.close()
            self._mode.release()


def _physical_bytes() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 40
