"""What tests compare: gradients bit for bit, and what a step leaves behind."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Every parameter has the gradient of its like in `plain`, bit for bit."""
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert any(grad is not None for grad in expected.values())
    for name, parameter in model.named_parameters():
        same(parameter.grad, expected[name], name)


def assert_same_buffers(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        same(buffer, expected[name], name)


def same(a: torch.Tensor | None, b: torch.Tensor | None, what: str = "") -> None:
    assert (a is None) == (b is None), what
    if a is not None and b is not None:
        assert a.dtype == b.dtype, what
        assert torch.equal(a, b), f"{what}: off by {(a - b).abs().max()}"


def no_hooks() -> bool:
    """Whether a tensor saved now would be seen by nobody."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def live_tensors() -> int:
    """How many tensors Python can reach."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class Storages(TorchDispatchMode):
    """The memory of every result computed while this is active, also where only C++ holds it."""

    def __init__(self, *known: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for thing in known for t in _tensors_of(thing)}
        self._seen: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._known:
                    self._seen.append(StorageWeakRef(storage))
        return out

    def live(self) -> int:
        """How many storages are still there, besides those of what was known before."""
        gc.collect()
        return len({ref.cdata for ref in self._seen if not ref.expired()})


def _tensors_of(thing: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    return [*thing.parameters(), *thing.buffers()]
