"""Arguments kept for a recompute, as autograd keeps saved tensors: a change in place raises."""

from __future__ import annotations

from typing import Any

import torch

from mimose.trees import map_tensors


class Held:
    """Arguments kept for the recompute while nobody else's hooks are active."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args = map_tensors(_Versioned, torch.Tensor, args)
        self.kwargs = map_tensors(_Versioned, torch.Tensor, kwargs)

    def release(self) -> tuple[Any, Any]:
        return (
            map_tensors(_Versioned.checked, _Versioned, self.args),
            map_tensors(_Versioned.checked, _Versioned, self.kwargs),
        )


class _Versioned:
    """A tensor that must not be changed in place until it is used again."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def checked(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: an argument of a recomputed block, {list(self.tensor.shape)} "
                f"{self.tensor.dtype}, is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


class HeldByGraph:
    """Arguments kept as saved tensors, so that an outer checkpoint's hooks take charge of them."""

    __slots__ = ("args", "kwargs", "node")

    def __init__(self, args: Any, kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []

        def place(tensor: torch.Tensor) -> _Place:
            tensors.append(tensor)
            return _Place(len(tensors) - 1)

        self.args = map_tensors(place, torch.Tensor, args)
        self.kwargs = map_tensors(place, torch.Tensor, kwargs)
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        self.node: Any = _Save.apply(anchor, *tensors).grad_fn  # type: ignore[no-untyped-call]

    def release(self) -> tuple[Any, Any]:
        tensors = self.node.saved_tensors

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
