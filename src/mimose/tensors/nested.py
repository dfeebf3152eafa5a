"""Tensors in nested values, such as the arguments and outputs of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in tuples, lists, mappings and dataclasses, depth first.

    >>> [t.shape[0] for t in tensors_in((torch.ones(1), {"a": [torch.ones(2), "x"]}))]
    [1, 2]
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (str, bytes)):
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, (dict, Mapping)):  # isinstance of Mapping alone is slow
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def argument_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among a call's arguments: in tuples, lists and dicts, at any depth."""
    found: list[torch.Tensor] = []
    _collect(args, found)
    _collect(kwargs.values(), found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a `DTensor`, which itself reports its global shape and bytes.

    Any other tensor is returned unchanged.
    """
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of some tensors in this process."""
    tensors = list(tensors)
    try:
        return sum([local_tensor(tensor).nbytes for tensor in tensors])
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no nbytes
        return sum(sum(storage_bytes(tensor).values()) for tensor in tensors)


def storage_bytes(value: Any) -> dict[int, int]:
    """The bytes of each storage of the tensors in a value. Views of one storage count once."""
    return {key: allocated_bytes(storage) for key, storage in storages_in(value).items()}


def new_bytes(out: Any, inputs: Any) -> int:
    """The bytes of the storages in an output that are not storages of inputs."""
    known = storage_bytes(inputs)
    return sum(size for key, size in storage_bytes(out).items() if key not in known)


def allocated_bytes(storage: torch.UntypedStorage) -> int:
    """The bytes of device memory that a storage takes: on CUDA, a multiple of 512."""
    size = storage.nbytes()
    return size if storage.device.type == "cpu" else (size + 511) & ~511


def storages_in(value: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors in a value, by address."""
    storages = (storage_of(part) for t in tensors_in(value) for part in dense_parts(t))
    return {s._cdata: s for s in storages if s is not None}


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's shape; a strided nested tensor has none itself, but one of each of its parts."""
    try:
        return tensor.shape
    except RuntimeError:
        return tuple([tuple(part.shape) for part in tensor.detach().unbind()])


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage in this process; None for sparse, fake and similar tensors."""
    try:
        return local_tensor(tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version counter; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse tensor consists of; a dense tensor itself."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def equal_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type, layout and values."""
    kinds = ((shape_of(tensor), tensor.dtype, tensor.layout) for tensor in (one, other))
    return next(kinds) == next(kinds) and all(
        map(torch.equal, dense_parts(one), dense_parts(other))
    )


def map_tensors(change: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """Apply `change` to each instance of `kind` in plain tuples, lists and dicts.

    Subclasses of these may have behaviour of their own and are passed through.
    """
    if isinstance(value, kind):
        return change(value)
    cls = type(value)
    if cls is tuple:
        return tuple([map_tensors(change, kind, item) for item in value])
    if cls is list:
        return [map_tensors(change, kind, item) for item in value]
    if cls is dict:
        return {key: map_tensors(change, kind, item) for key, item in value.items()}
    return value
