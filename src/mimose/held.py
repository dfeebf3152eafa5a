"""Arguments kept for a recompute, as autograd keeps saved tensors: a change in place raises."""

from __future__ import annotations

from typing import Any

import torch

from mimose.trees import argument_tensors, map_tensors


class Held:
    """Arguments kept for the recompute while nobody else's hooks are active."""

    __slots__ = ("args", "kwargs", "versions")

    def __init__(self, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        self.args, self.kwargs = _own_containers(args, kwargs)
        self.versions = [_version(tensor) for tensor in tensors]

    def release(self) -> tuple[Any, Any]:
        tensors = argument_tensors(self.args, self.kwargs)
        for tensor, version in zip(tensors, self.versions, strict=False):
            if _version(tensor) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: an argument of a recomputed block, {list(tensor.shape)} "
                    f"{tensor.dtype}, is at version {tensor._version}; expected version {version} "
                    "instead"
                )
        return _own_containers(self.args, self.kwargs)


def _own_containers(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same arguments, in lists and dicts that the block may append to without effect here."""
    if any(type(value) in (list, dict, tuple) for value in (*args, *kwargs.values())):
        return map_tensors(_same, torch.Tensor, args), map_tensors(_same, torch.Tensor, kwargs)
    return args, kwargs


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class HeldByGraph:
    """Arguments kept as saved tensors, so that an outer checkpoint's hooks take charge of them."""

    __slots__ = ("args", "kwargs", "result")

    def __init__(self, args: Any, kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []

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

        return map_tensors(tensor, _Place, self.args), map_tensors(tensor, _Place, self.kwargs)


class _Place:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")
