"""Arguments kept for a recompute, as autograd keeps saved tensors: a change in place raises."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from mimose.execution.caches import copy_of_cache, is_cache, tensors_in_cache
from mimose.tensors import argument_tensors, map_tensors, tensors_in


class SavedArguments:
    """Arguments kept for the recompute while nobody else's hooks are active."""

    __slots__ = ("args", "kwargs", "versions")

    def __init__(self, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        self.args, self.kwargs = own_containers(args, kwargs)
        self.versions = [_version(tensor) for tensor in (*tensors, *self._wrapped())]

    def release(self) -> tuple[Any, Any]:
        for tensor, version in self._changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: an argument of a recomputed block, {list(tensor.shape)} "
                f"{tensor.dtype}, is at version {tensor._version}; expected version {version} "
                "instead"
            )
        return own_containers(self.args, self.kwargs)

    @property
    def changed(self) -> bool:
        """Whether a tensor among them has been changed in place since."""
        return any(True for _ in self._changed())

    def _changed(self) -> Iterator[tuple[torch.Tensor, int]]:
        tensors = (*argument_tensors(self.args, self.kwargs), *self._wrapped())
        for tensor, version in zip(tensors, self.versions, strict=False):
            if _version(tensor) != version:
                yield tensor, version

    def _wrapped(self) -> Iterator[torch.Tensor]:
        """The tensors in arguments that are dataclasses, caches or mappings of other kinds."""
        for value in (*self.args, *self.kwargs.values()):
            if _is_record(value):
                yield from tensors_in_cache(value) if is_cache(type(value)) else tensors_in(value)


def own_containers(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same arguments, in containers that the block may change without effect here."""
    if any(type(value) in (list, dict, tuple) for value in (*args, *kwargs.values())):
        args = map_tensors(_same, torch.Tensor, args)
        kwargs = map_tensors(_same, torch.Tensor, kwargs)
    return _own_records(args, kwargs)


def _own_records(args: Any, kwargs: Any) -> tuple[Any, Any]:
    if any(map(_is_record, (*args, *kwargs.values()))):
        args = tuple(map(_own_record, args))
        kwargs = {name: _own_record(value) for name, value in kwargs.items()}
    return args, kwargs


def _is_record(value: Any) -> bool:
    """Whether it is a dataclass or a mapping of its own kind, copied as a whole, not deeply; or a
    cache."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    record = isinstance(value, MutableMapping) or (is_dataclass(value) and kind is not type)
    return record or is_cache(kind)


def _own_record(value: Any) -> Any:
    if is_cache(type(value)):
        return copy_of_cache(value)
    return copy.copy(value) if _is_record(value) else value


_PLAIN = frozenset(
    {torch.Tensor, nn.Parameter, list, dict, tuple, int, bool, float, str, type(None)}
)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class ArgumentsSavedByGraph:
    """Arguments kept as saved tensors, so that an outer checkpoint's hooks take charge of them."""

    __slots__ = ("args", "kwargs", "result")

    changed = False  # the outer checkpoint finds that out

    def __init__(self, args: Any, kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []
        args, kwargs = _own_records(args, kwargs)

        def place(tensor: torch.Tensor) -> _Place:
            tensors.append(tensor)
            return _Place(len(tensors) - 1)

        self.args = map_tensors(place, torch.Tensor, args)
        self.kwargs = map_tensors(place, torch.Tensor, kwargs)
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        # The result itself is held: its node alone would be emptied with it.
        self.result: Any = _Save.apply(anchor, *tensors)  # type: ignore[no-untyped-call]

    def release(self) -> tuple[Any, Any]:
        tensors = self.result.grad_fn.saved_tensors

        def tensor(place: _Place) -> torch.Tensor:
            found: torch.Tensor = tensors[place.index]
            return found

        args, kwargs = _own_records(self.args, self.kwargs)
        return map_tensors(tensor, _Place, args), map_tensors(tensor, _Place, kwargs)


class _Place:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")
