"""Tensors in nested values: what blocks take and return."""

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
    elif isinstance(value, (dict, Mapping)):  # asking for the latter alone is slow
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def argument_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among a call's arguments, in plain tuples, lists and dicts at any depth."""
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: of a sharded one its shard, else the tensor itself.

    A `DTensor` reports the shape and the bytes of the whole.
    """
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes that this process holds of some tensors."""
    tensors = list(tensors)
    try:
        return sum([local(tensor).nbytes for tensor in tensors])
    except (RuntimeError, NotImplementedError):  # sparse ones know only the bytes of their parts
        return sum(sum(storage_bytes(tensor).values()) for tensor in tensors)


def bytes_given(args: Any, kwargs: Any) -> int:
    """The bytes of the tensors among a call's arguments."""
    return bytes_of(argument_tensors(args, kwargs))


def storage_bytes(value: Any) -> dict[int, int]:
    """The bytes of each storage behind the tensors in a value; views of one count once."""
    return {key: storage.nbytes() for key, storage in storages_in(value).items()}


def storages_in(value: Any) -> dict[int, torch.UntypedStorage]:
    """Each storage behind the tensors in a value, once."""
    storages = (storage_of(part) for tensor in tensors_in(value) for part in _parts(tensor))
    return {s._cdata: s for s in storages if s is not None}


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Where this process holds a tensor; None if it has no one place: sparse, fake."""
    try:
        return local(tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a tensor consists of."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def map_tensors(change: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """`value` with `change` applied to each `kind` in plain tuples, lists and dicts.

    Other containers may carry behaviour of their own and are passed on as they are.
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
