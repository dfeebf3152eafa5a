"""Detects blocks that were rebuilt during a run: replaced, or with replaced modules inside.

Their learned costs are no longer valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from mimose.interception import BlockInterceptor
from mimose.training.registrations import Registrations


class Rebuilt:
    """Reports which blocks were replaced since the last call, and moves their interceptors to the
    new modules."""

    def __init__(self, model: nn.Module, interceptors: Sequence[BlockInterceptor]) -> None:
        self._model = weakref.ref(model)
        self._interceptors = interceptors
        self._parts = [_parts_of(interceptor.module) for interceptor in interceptors]
        self._registrations = Registrations()

    def since_last(self) -> list[str]:
        """The names of blocks that were rebuilt since the last call."""
        if not self._registrations.any_since_last():
            return []
        model = self._model()
        return [
            interceptor.name
            for at, interceptor in enumerate(self._interceptors)
            if model is not None and self._was_rebuilt(at, interceptor, model)
        ]

    def _was_rebuilt(self, at: int, interceptor: BlockInterceptor, model: nn.Module) -> bool:
        try:
            present = model.get_submodule(interceptor.name)
        except AttributeError:  # removed from the model: nothing to plan
            return False
        former = interceptor.module_if_alive
        if present is not former and not _contains(present, former):
            interceptor.move_to(present)
        block = interceptor.module
        if [part() for part in self._parts[at]] == list(block.modules()):
            return False
        self._parts[at] = _parts_of(block)
        return True


def _parts_of(block: nn.Module) -> list[weakref.ref[nn.Module]]:
    return [weakref.ref(part) for part in block.modules()]


def _contains(module: nn.Module, former: nn.Module | None) -> bool:
    """Whether `module` only wraps the former block, as after compiling it."""
    return former is not None and any(part is former for part in module.modules())
