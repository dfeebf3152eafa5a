"""Count the bytes of live tensor storages on a CPU, whose allocator has no statistics."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mimose.tensors import storage_of, task_id, tensors_in
from mimose.units import text_of


class StorageCounter(TorchDispatchMode):
    """A dispatch mode that sees every operator's outputs; finalizers report freed storages.

    All meters of a process share one counter. It is entered with the first meter and exited with
    the last, always below the user's own modes, so that those nest as usual.
    """

    _shared: StorageCounter | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_use = 0
        self.peak = 0
        self.limit: int | None = None
        self.failures = 0
        self._limits: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._counted: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """References whose callbacks report that a storage was freed."""
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """FSDP2's unsharded parameters, which it resizes without calling an operator."""
        self._users = 0
        self._counting = True
        self._lock = threading.RLock()

    @classmethod
    def shared(cls) -> StorageCounter:
        """The process's counter, entered and with one more user."""
        counter = cls._shared = cls._shared or cls()
        if counter._users == 0:
            counter._counting = True
            counter._count_live_tensors()
        if counter not in _user_modes():
            with _without(_user_modes()):
                counter.__enter__()  # type: ignore[no-untyped-call]
        counter._users += 1
        return counter

    def set_limit(self, meter: int, number_of_bytes: int | None) -> None:
        """Set one meter's limit. The smallest limit of all meters applies."""
        self._limits.pop(meter, None)
        if number_of_bytes is not None:
            self._limits[meter] = number_of_bytes
        self.limit = min(self._limits.values(), default=None)

    def release(self) -> None:
        """Drop one user; exit the mode after the last one."""
        self._users -= 1
        if self._users:
            return
        self._counting = False
        modes = _user_modes()
        # A finalizer may call this from another thread or from inside the mode itself, and the end
        # of a backward restores the modes of its start. Then the mode stays for the next user.
        if self in modes and task_id() == -1:
            with _without(modes[modes.index(self) + 1 :]):
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if type(self)._shared is self:
                type(self)._shared = None
            self._counted.clear()  # callbacks would keep this counter alive

    @classmethod
    def stop_in_child(cls) -> None:
        """In a forked process: neither count nor limit. Meters made there share a new counter.

        A worker of a DataLoader has memory of its own, and another thread of the parent may have
        held the lock.
        """
        counter, cls._shared = cls._shared, None
        if counter is not None:
            counter._counting, counter._lock = False, threading.RLock()
            counter._limits, counter.limit = {}, None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._counting:
            return func(*args, **(kwargs or {}))
        before, peak = self.in_use, self.peak
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):  # nearly always, and this runs for every operator
            self._count(out)
        elif out is None:
            if getattr(func, "namespace", "") == "fsdp":
                self._track_gathered((kwargs or {}).get("out"))
        else:
            for tensor in tensors_in(out):
                self._count(tensor)
        if self.limit is not None and self.in_use > max(self.limit, before):
            self.failures += 1
            self.peak = peak  # a real allocator would have refused the request
            # Worded like CUDA's allocator: accelerate searches for " out of memory.".
            raise torch.OutOfMemoryError(
                f"CPU out of memory. {func} exceeds the limit of {text_of(self.limit)} by "
                f"{text_of(self.in_use - self.limit)}"
            )
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor) if tensor.is_cpu else None
        if storage is None:
            return
        key = storage._cdata
        counted = self._sizes.get(key)
        # A compiler's fake tensor claims to be on the CPU; its storage is on "meta".
        if counted is None and storage.device.type != "cpu":
            return
        size = storage.nbytes()
        if size == counted:  # most results are views of what was counted before
            return
        if self._gathered and self.in_use + size > min(self.peak, self.limit or self.peak):
            self.update_gathered()  # what was freed meanwhile must not count
        with self._lock:
            if counted is None:
                self._counted[key] = weakref.ref(storage, lambda _: self._uncount(key))
            self._set_size(key, size)

    def _set_size(self, key: int, size: int) -> None:
        with self._lock:
            self.in_use += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self.peak = max(self.peak, self.in_use)

    def _uncount(self, key: int) -> None:
        with self._lock:
            self.in_use -= self._sizes.pop(key, 0)
            self._counted.pop(key, None)

    def _track_gathered(self, tensors: Any) -> None:
        for tensor in tensors_in(tensors):
            self._count(tensor)
            storage = tensor.untyped_storage()
            self._gathered[storage._cdata] = weakref.ref(storage)

    def update_gathered(self) -> None:
        """Count unsharded parameters that were freed or allocated without an operator."""
        for key, ref in list(self._gathered.items()):
            storage = ref()
            if storage is None:
                del self._gathered[key]
            elif storage.nbytes() != self._sizes.get(key):
                self._set_size(key, storage.nbytes())

    def _count_live_tensors(self) -> None:
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._count(thing)
                with suppress(RuntimeError):  # a view whose base was changed without grad mode
                    if thing.is_leaf and thing.grad is not None:
                        self._count(thing.grad)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=StorageCounter.stop_in_child)


def _user_modes() -> list[TorchDispatchMode]:
    """The dispatch modes entered in this thread, outermost first; without torch's own."""
    stack = _get_current_dispatch_mode_stack()
    return [mode for mode in stack if getattr(mode, "_mode_key", None) is None]


@contextmanager
def _without(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Pop these innermost modes, then push them again, without calling their own enter and exit."""
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)
