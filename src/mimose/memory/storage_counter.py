"""Count the bytes of live tensor storages on a CPU, where no allocator does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mimose.tensors import local, task_id, tensors_in


class StorageCounter(TorchDispatchMode):
    """Sees every operator's results; finalizers tell when their storages die.

    All meters of a process share one, entered with the first and left with the last, below the
    modes of others: whoever enters and leaves one around any of this finds it in its place.
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
        self._ends: dict[int, weakref.finalize[..., Any]] = {}
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """FSDP2's whole parameters, which it frees and takes again behind the dispatcher's back."""
        self._users = 0
        self._counting = True
        self._lock = threading.RLock()

    @classmethod
    def shared(cls) -> StorageCounter:
        mode = cls._shared = cls._shared or cls()
        if mode._users == 0:
            mode._counting = True
            mode._count_what_lives()
        if mode not in _modes():
            with _lifted(_modes()):
                mode.__enter__()  # type: ignore[no-untyped-call]
        mode._users += 1
        return mode

    def set_limit(self, meter: int, number_of_bytes: int | None) -> None:
        """The smallest limit of all meters holds."""
        self._limits.pop(meter, None)
        if number_of_bytes is not None:
            self._limits[meter] = number_of_bytes
        self.limit = min(self._limits.values(), default=None)

    def release(self) -> None:
        self._users -= 1
        if self._users:
            return
        self._counting = False
        modes = _modes()
        # A finalizer may call from another thread or from inside of the mode itself, and what is
        # left in a backward comes back with its end. Then it stays, for the next to take over.
        if self in modes and task_id() == -1:
            with _lifted(modes[modes.index(self) + 1 :]):
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            type(self)._shared = None
            for end in list(self._ends.values()):
                end.detach()  # storages live on, and hold nothing of this

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._counting:
            return func(*args, **(kwargs or {}))
        before, peak = self.in_use, self.peak
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "fsdp":
            self._note_gathered((kwargs or {}).get("out"))
        if self._gathered:
            self.look_at_gathered()
        if isinstance(out, torch.Tensor):
            self._count(out)
        elif out is not None:
            for tensor in tensors_in(out):
                self._count(tensor)
        if self.limit is not None and self.in_use > max(self.limit, before):  # it takes memory
            self.failures += 1
            self.peak = peak  # an allocator would not have given what is over its limit
            # In the words of CUDA's allocator: accelerate looks for " out of memory.".
            raise torch.OutOfMemoryError(
                f"CPU out of memory. {func}: {self.in_use} bytes in use, the limit is {self.limit}"
            )
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            return
        try:
            storage = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor without storage: sparse, fake, …
            return
        if storage.device.type != "cpu":  # a compiler's fake tensor, that only says it were here
            return
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            known = self._sizes.get(key)
            if known is None:
                self._ends[key] = weakref.finalize(storage, self._forget, key)
                self._ends[key].atexit = False
            self._sizes[key] = size
            self.in_use += size - (known or 0)
            self.peak = max(self.peak, self.in_use)

    def _note_gathered(self, tensors: Any) -> None:
        for tensor in tensors_in(tensors):
            self._count(tensor)
            storage = tensor.untyped_storage()
            self._gathered[storage._cdata] = weakref.ref(storage)

    def look_at_gathered(self) -> None:
        """Count what has been freed or taken without an operator."""
        for key, ref in list(self._gathered.items()):
            storage = ref()
            if storage is None:
                del self._gathered[key]
            elif storage.nbytes() != self._sizes.get(key):
                self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        with self._lock:
            self.in_use += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self.peak = max(self.peak, self.in_use)

    def _forget(self, key: int) -> None:
        with self._lock:
            self.in_use -= self._sizes.pop(key, 0)
            self._ends.pop(key, None)

    def _count_what_lives(self) -> None:
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._count(thing)
                with suppress(RuntimeError):  # a view whose base was changed behind its back
                    if thing.is_leaf and thing.grad is not None:
                        self._count(thing.grad)


def _modes() -> list[TorchDispatchMode]:
    """The modes that people have entered in this thread, the outermost first."""
    stack = _get_current_dispatch_mode_stack()
    return [mode for mode in stack if getattr(mode, "_mode_key", None) is None]  # not torch's own


@contextmanager
def _lifted(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Off these innermost modes, and on them again; they themselves do not notice."""
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)
