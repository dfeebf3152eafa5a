"""The buffers of a model at one moment."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from mimose.execution import may_change
from mimose.interception import BlockInterceptor
from mimose.tensors import dense_parts, version_of


class FormerBuffers:
    """Every module's buffers, with copies of those that may change.

    A large buffer is copied if a block's forward is known to change it, or once an earlier step has
    changed it. Modules are held only while a step runs.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._bare: list[dict[str, torch.Tensor | None]] = []
        """The empty `_buffers` of the other modules."""
        self._former: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        self._copied: list[torch.Tensor] = []
        """Buffers that may change; of sparse ones the dense tensors that they consist of."""
        self._values: list[torch.Tensor] = []
        self._uncopied: list[tuple[torch.Tensor, int, tuple[int, str]]] = []
        self._changing: set[tuple[int, str]] = set()
        """Large buffers that were seen to change: id of the module, and name."""

    def look_for_modules(self, model: nn.Module) -> None:
        """Find the modules of the model, with and without buffers."""
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules if module._buffers]
        self._bare = [module._buffers for module in modules if not module._buffers]

    @property
    def any_registered(self) -> bool:
        """Whether a module has got its first buffer since `look_for_modules`."""
        return any(self._bare)

    def take(self, interceptors: Sequence[BlockInterceptor]) -> None:
        """Store the buffers, and copies of those that may change."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        self._former = [(module, dict(module._buffers)) for module in modules]
        self._choose(interceptors)
        if [_kind(value) for value in self._values] != [_kind(buffer) for buffer in self._copied]:
            self._values = [buffer.clone() for buffer in self._copied]
        elif self._copied:
            _copy_all(self._values, self._copied)

    def _choose(self, interceptors: Sequence[BlockInterceptor]) -> None:
        """Which buffers to copy."""
        self._copied, large = [], []
        for module, buffers in self._former:
            for name, buffer in buffers.items():
                if buffer is None:
                    continue
                if may_change(module, buffer):
                    self._copied += dense_parts(buffer)
                else:
                    large.append((buffer, (id(module), name)))
        known: set[tuple[int, str]] = self._changing
        if large:
            known = known.union((id(m), n) for one in interceptors for m, n in one.changing)
        for buffer, slot in large:
            self._copied += dense_parts(buffer) if slot in known else ()
        rest = [(buffer, slot) for buffer, slot in large if slot not in known]
        self._uncopied = [(buffer, version_of(buffer), slot) for buffer, slot in rest]

    def overwritten(self) -> torch.Tensor | None:
        """A large buffer that was changed in place without a copy."""
        return next((b for b, version, _ in self._uncopied if version_of(b) != version), None)

    def give_back(self) -> None:
        """Restore the buffers and their values; remove those that were added."""
        for module, buffers in self._former:
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffers in self._bare:
            buffers.clear()
        if self._copied:
            _copy_all(self._copied, self._values)

    def release(self) -> None:
        """The step is over: remember which large buffers it has changed."""
        changed = {slot for b, version, slot in self._uncopied if version_of(b) != version}
        self._changing |= changed
        self._former, self._copied, self._uncopied = [], [], []


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _copy_all(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy all tensors, with one launch for each dtype and device if torch supports it."""
    foreach_copy = getattr(torch, "_foreach_copy_", None)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault((value.dtype, value.device), []).append(i)
    with torch.no_grad():
        for group in groups.values():
            targets, sources = [to[i] for i in group], [values[i] for i in group]
            if foreach_copy is not None:
                foreach_copy(targets, sources)
            else:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
