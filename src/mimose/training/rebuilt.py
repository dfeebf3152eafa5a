"""Detects blocks that were rebuilt during a run: replaced, or with replaced modules inside.

Their learned costs are no longer valid. PyTorch calls a hook when a module is registered in another
one. To save time, the model is checked only after that, and otherwise every 64th time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mimose.interception import BlockInterceptor

_CALLS_BETWEEN_CHECKS = 64
"""Blocks are checked after this many calls even without a registration, since code may write to
`_modules` directly."""


class Rebuilt:
    """Reports which blocks were replaced since the last call, and moves their interceptors to the
    new modules."""

    def __init__(self, model: nn.Module, interceptors: Sequence[BlockInterceptor]) -> None:
        self._model = weakref.ref(model)
        self._interceptors = interceptors
        self._parts = [_parts_of(interceptor.module) for interceptor in interceptors]
        self._registered = False
        self._calls = 0
        own = weakref.ref(self)

        def note_registration(*_: Any) -> None:
            if (rebuilt := own()) is not None:
                rebuilt._registered = True

        hook = register_module_module_registration_hook(note_registration)
        self.close = weakref.finalize(self, hook.remove)
        self.close.atexit = False

    def since_last(self) -> list[str]:
        """The names of blocks that were rebuilt since the last call."""
        self._calls += 1
        if not self._registered and self._calls % _CALLS_BETWEEN_CHECKS:
            return []
        self._registered, model = False, self._model()
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
