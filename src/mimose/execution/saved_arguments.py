"""Keep arguments for a recompute. As with autograd's saved tensors, an in-place change raises."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from mimose.execution.caches import copy_cache, is_cache, tensors_in_cache
from mimose.execution.second_run import Arguments, StandsFor, arguments_again
from mimose.tensors import argument_tensors, map_tensors, shape_of, tensors_in, version_of

_PLAIN = frozenset(
    {torch.Tensor, nn.Parameter, list, dict, tuple, int, bool, float, str, type(None)}
)


class SavedArguments:
    """Arguments kept for the recompute if no saved-tensor hooks are active."""

    __slots__ = ("_in_records", "args", "kwargs", "versions")

    def __init__(self, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        self.args, self.kwargs = copy_containers(args, kwargs)
        self._in_records = list(self._tensors_in_records())  # once: a cache may have hundreds
        self.versions = [version_of(tensor) for tensor in (*tensors, *self._in_records)]

    def unpack(self) -> tuple[Any, Any]:
        """The arguments for one recompute, in containers of its own; raises if a tensor changed."""
        for tensor, version in self._changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: an argument of a recomputed block, {list(shape_of(tensor))} "
                f"{tensor.dtype}, is at version {tensor._version}; expected version {version} "
                "instead"
            )
        return copy_containers(self.args, self.kwargs)

    @property
    def changed(self) -> bool:
        """Whether a tensor among the arguments was changed in place since they were saved."""
        return any(True for _ in self._changed())

    def again(self, now: Arguments, copied: StandsFor, *, own_caches: bool) -> Arguments | None:
        """The arguments with which a forward that broke off can run again (`arguments_again`)."""
        return arguments_again(now, (self.args, self.kwargs), copied, own_caches=own_caches)

    def _changed(self) -> Iterator[tuple[torch.Tensor, int]]:
        tensors = (*argument_tensors(self.args, self.kwargs), *self._in_records)
        for tensor, version in zip(tensors, self.versions, strict=False):
            if version_of(tensor) != version:
                yield tensor, version

    def _tensors_in_records(self) -> Iterator[torch.Tensor]:
        for value in (*self.args, *self.kwargs.values()):
            if _is_record(value):
                yield from tensors_in_cache(value) if is_cache(type(value)) else tensors_in(value)


def copy_containers(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same arguments in new containers, which a block may change."""
    if any(type(value) in (list, dict, tuple) for value in (*args, *kwargs.values())):
        args = map_tensors(_identity, torch.Tensor, args)
        kwargs = map_tensors(_identity, torch.Tensor, kwargs)
    return _copy_records(args, kwargs)


def _copy_records(args: Any, kwargs: Any) -> tuple[Any, Any]:
    if any(map(_is_record, (*args, *kwargs.values()))):
        args = tuple(map(_copy_record, args))
        kwargs = {name: _copy_record(value) for name, value in kwargs.items()}
    return args, kwargs


def _is_record(value: Any) -> bool:
    """Whether a value is a dataclass, a mapping other than dict, or a cache."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    record = isinstance(value, MutableMapping) or (is_dataclass(value) and kind is not type)
    return record or is_cache(kind)


def _copy_record(value: Any) -> Any:
    if is_cache(type(value)):
        return copy_cache(value)
    return copy.copy(value) if _is_record(value) else value


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class ArgumentsSavedByGraph:
    """Arguments kept as saved tensors, so that an outer checkpoint's hooks handle them."""

    __slots__ = ("_versions", "args", "kwargs", "result")

    def __init__(self, args: Any, kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []
        args, kwargs = _copy_records(args, kwargs)

        def save(tensor: torch.Tensor) -> _Index:
            tensors.append(tensor)
            return _Index(len(tensors) - 1)

        self.args = map_tensors(save, torch.Tensor, args)
        self.kwargs = map_tensors(save, torch.Tensor, kwargs)
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        # Keep the result, not only its node: the node's saved tensors are freed with the result.
        self.result: Any = _Save.apply(anchor, *tensors)  # type: ignore[no-untyped-call]
        self._versions = [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors]

    @property
    def changed(self) -> bool:
        """Whether a tensor among the arguments was changed in place since they were saved."""
        return any(
            tensor is not None and version_of(tensor) != version
            for tensor, version in ((ref(), version) for ref, version in self._versions)
        )

    def again(self, now: Arguments, copied: StandsFor, *, own_caches: bool) -> Arguments | None:
        """The arguments with which a forward that broke off can run again (`arguments_again`)."""

        def stands_for(value: Any, before: Any) -> bool:
            if isinstance(before, _Index):
                return self._versions[before][0]() is value
            return copied(value, before)

        return arguments_again(now, (self.args, self.kwargs), stands_for, own_caches=own_caches)

    def unpack(self) -> tuple[Any, Any]:
        """The arguments for one recompute, in containers of its own."""
        tensors = self.result.grad_fn.saved_tensors
        args, kwargs = _copy_records(self.args, self.kwargs)

        def load(index: _Index) -> Any:
            return tensors[index]

        return map_tensors(load, _Index, args), map_tensors(load, _Index, kwargs)


class _Index(int):
    """Stands for a saved tensor among the arguments."""


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")
