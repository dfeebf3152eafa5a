"""Keep what a block's backward needs in host memory: its saved tensors, or only its arguments.

The unit of a move is a storage: several views of one storage move it once. When the block's forward
is over, copies to the host begin. The caller chooses when the device's memory is released, and
when the bytes are fetched for the backward. If the backward needs them earlier, it fetches them
itself: a late fetch costs time, but is never wrong.

These stay on the device: parameters and their views (also FSDP2's gathered ones), the block's
arguments and outputs (which other code holds anyway), and small storages.

Only autograd's graph refers to the slots that stand for saved tensors. When the graph is freed, the
slots and their bytes on the host and on the device are freed too. So a retained graph, a second
backward and an exception need no code here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks

from mimose.execution.saved_arguments import SavedArguments
from mimose.memory import HostCopy, HostMemory
from mimose.tensors import (
    argument_tensors,
    is_parameter,
    map_tensors,
    storage_of,
    storages_in,
    version_of,
)


class MovedStorage:
    """A storage that moves to the host and back, and the saved tensors that are views of it.

    Autograd does not detect in-place changes of tensors that hooks have packed. So they are
    detected here, while the storage is on the device; later changes do not affect the copy.
    """

    __slots__ = ("__weakref__", "_changed", "_copy", "_freed", "_views")

    def __init__(self, copy: HostCopy, storage: torch.UntypedStorage) -> None:
        self._copy = copy
        self._freed = weakref.ref(storage)
        self._views: list[tuple[torch.Tensor, int]] = []
        self._changed: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self._copy.nbytes

    def add_view(self, tensor: torch.Tensor, version: int) -> None:
        """Add a saved tensor, to be checked for changes since `version`."""
        self._views.append((tensor, version))

    def release(self) -> int:
        """Release the device memory. Returns the freed bytes: 0 if other code holds the storage."""
        self._check_versions()
        self._views.clear()
        self._copy.release()
        return self._copy.nbytes if self._freed() is None else 0

    def fetch(self) -> None:
        """Start to copy the bytes back to the device."""
        self._copy.fetch()

    def view(self, geometry: _Geometry) -> torch.Tensor:
        """A tensor of this geometry on the device. Raises if a view was changed in place."""
        self._check_versions()
        if self._changed is not None:
            _raise_changed(self._changed)
        return geometry.on(self._copy.storage())

    def _check_versions(self) -> None:
        for tensor, version in self._views:
            if version_of(tensor) != version:
                self._changed = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _Geometry(NamedTuple):
    """The part of a storage that a tensor covers."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        offset, strides = int(tensor.storage_offset()), tensor.stride()
        return cls(tensor.dtype, tensor.device, offset, tensor.shape, strides)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        return tensor.set_(storage, self.offset, self.shape, self.strides)


class _Slot:
    """Stands for a tensor: in autograd's graph, or among the arguments of a recompute."""

    __slots__ = ("_geometry", "_moved", "_requires_grad", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._requires_grad = tensor.requires_grad
        self._moved: MovedStorage | None = None
        self._geometry = _NOWHERE

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself. Only valid before `move_with`."""
        assert self._tensor is not None
        return self._tensor

    def move_with(self, moved: MovedStorage) -> None:
        """Replace the tensor by a view of the storage, whose move has begun."""
        moved.add_view(self.tensor, self._version)
        self._geometry, self._moved = _Geometry.of(self.tensor), moved
        self._tensor = None

    def unpack(self) -> torch.Tensor:
        """The tensor, on the device."""
        if self._moved is not None:
            return self._moved.view(self._geometry)
        if version_of(self.tensor) != self._version:
            _raise_changed(self.tensor)
        return self.tensor

    def unpack_argument(self) -> torch.Tensor:
        """The tensor, on the device, requiring a gradient if the argument did."""
        return self.unpack().requires_grad_(self._requires_grad)


_NOWHERE = _Geometry(torch.uint8, torch.device("cpu"), 0, torch.Size(()), ())


def run_saving_on_host(
    function: Callable[..., Any], args: Any, kwargs: Any, host: HostMemory
) -> tuple[Any, list[MovedStorage]]:
    """Call a function and begin to move what it saves for its backward.

    Returns the output and the storages that move.
    """
    movable: list[_Slot] = []

    def pack(tensor: torch.Tensor) -> _Slot:
        slot = _Slot(tensor)
        if not is_parameter(tensor):
            movable.append(slot)
        return slot

    with saved_tensors_hooks(pack, _Slot.unpack):
        out = function(*args, **kwargs)
    moved = _move(movable, storages_in((args, kwargs, out)).keys(), host)
    movable.clear()  # saved tensors hold the hooks, and these hold this list of all slots
    return out, moved


class ArgumentsOnHost:
    """The arguments of a recompute, some of them in host memory."""

    __slots__ = ("_saved", "moved")

    changed = False  # each tensor is checked when it is unpacked

    def __init__(
        self, saved: SavedArguments, movable: Sequence[torch.Tensor], host: HostMemory
    ) -> None:
        storages, slots = storages_in(list(movable)).keys(), []

        def slot_for(tensor: torch.Tensor) -> Any:
            storage = storage_of(tensor) if _can_move(tensor, host) else None
            if storage is None or storage._cdata not in storages:
                return tensor
            slots.append(_Slot(tensor))
            return slots[-1]

        args = map_tensors(slot_for, torch.Tensor, saved.args)
        kwargs = map_tensors(slot_for, torch.Tensor, saved.kwargs)
        self._saved = SavedArguments(args, kwargs, argument_tensors(args, kwargs))
        self.moved = _move(slots, (), host)

    def unpack(self) -> tuple[Any, Any]:
        """The arguments for one recompute, in containers of its own; raises if a tensor changed."""
        args, kwargs = self._saved.unpack()
        return tuple(map_tensors(_Slot.unpack_argument, _Slot, value) for value in (args, kwargs))


class ArgumentsOfStep:
    """Finds the arguments of a block's call that can wait on the host until its recompute.

    An argument of an earlier call in the step (a mask, an encoder's output) stays on the device:
    the other calls hold it anyway.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def movable(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The movable arguments of the next call."""
        movable = []
        for tensor in argument_tensors(args, kwargs):
            storage = storage_of(tensor)
            if storage is None:
                continue
            seen = self._seen.get(storage._cdata)
            self._seen[storage._cdata] = weakref.ref(storage)
            seen_before = seen is not None and seen() is storage
            if tensor.requires_grad and not seen_before and _can_move(tensor, self._host):
                movable.append(tensor)
        return movable


def _can_move(tensor: torch.Tensor, host: HostMemory) -> bool:
    """Whether a tensor is a plain dense one on the device, not a parameter, and large enough."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.device.type != host.device.type or is_parameter(tensor):
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested:
        return False
    storage = storage_of(tensor)
    return storage is not None and storage.nbytes() > 0 and storage.nbytes() >= host.smallest_bytes


def _move(slots: Sequence[_Slot], staying: Any, host: HostMemory) -> list[MovedStorage]:
    """Begin to move the storages of these slots, except those whose addresses are in `staying`."""
    by_storage: dict[int, list[_Slot]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for slot in slots:
        storage = storage_of(slot.tensor)
        if storage is None or storage._cdata in staying:
            continue
        if storage._cdata not in storages and not _can_move(slot.tensor, host):
            continue
        storages[storage._cdata] = storage
        by_storage.setdefault(storage._cdata, []).append(slot)
    moving = []
    with host.stream.together():
        for key in _worth_moving(storages):
            copy = host.copy(storages[key])
            if copy is not None:
                moving.append(MovedStorage(copy, storages[key]))
                for slot in by_storage[key]:
                    slot.move_with(moving[-1])
    return moving


_NEGLIGIBLE = 0.002
"""The share of a block's bytes that may stay on the device in small storages. Queueing their copies
would cost more host time than their bytes are worth."""


def _worth_moving(storages: Mapping[int, torch.UntypedStorage]) -> list[int]:
    """The storages to move, in the given order: all but the smallest, negligible in total."""
    sizes = {key: storage.nbytes() for key, storage in storages.items()}
    left = _NEGLIGIBLE * sum(sizes.values())
    for key in sorted(sizes, key=lambda key: sizes[key]):
        left -= sizes[key]
        if left < 0:
            break
        del sizes[key]
    return list(sizes)


def _raise_changed(tensor: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {list(tensor.shape)} {tensor.dtype}"
    )
