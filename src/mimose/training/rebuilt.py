"""Notice that blocks were rebuilt in mid-run: they, or modules in them, were exchanged for others.

What was learned of them does not hold for what they are now. PyTorch tells when a module is put
into another one; only then, and now and then, is the model looked at, so that steps do not wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mimose.interception import BlockInterceptor

_NOW_AND_THEN = 64
"""Steps after which blocks are looked at although nothing was told: `_modules` may be written."""


class Rebuilt:
    """Tells which blocks were rebuilt since it was last asked; seats of exchanged ones move."""

    def __init__(self, model: nn.Module, interceptors: Sequence[BlockInterceptor]) -> None:
        self._model = weakref.ref(model)
        self._interceptors = interceptors
        self._parts = [_parts_of(interceptor.module) for interceptor in interceptors]
        self._told = False
        self._asked = 0
        own = weakref.ref(self)

        def tell(*_: Any) -> None:
            if (rebuilt := own()) is not None:
                rebuilt._told = True

        self.close = weakref.finalize(self, register_module_module_registration_hook(tell).remove)
        self.close.atexit = False

    def since_last(self) -> list[str]:
        """The names of blocks that are no longer what they were."""
        self._asked += 1
        if not self._told and self._asked % _NOW_AND_THEN:
            return []
        self._told, model = False, self._model()
        return [
            interceptor.name
            for at, interceptor in enumerate(self._interceptors)
            if model is not None and self._look_at(at, interceptor, model)
        ]

    def _look_at(self, at: int, interceptor: BlockInterceptor, model: nn.Module) -> bool:
        try:
            there = model.get_submodule(interceptor.name)
        except AttributeError:  # taken out of the model: there is nothing to plan for
            return False
        former = interceptor.module_if_alive
        if there is not former and not _contains(there, former):
            interceptor.move_to(there)
        block = interceptor.module
        if [part() for part in self._parts[at]] == list(block.modules()):
            return False
        self._parts[at] = _parts_of(block)
        return True


def _parts_of(block: nn.Module) -> list[weakref.ref[nn.Module]]:
    return [weakref.ref(part) for part in block.modules()]


def _contains(module: nn.Module, former: nn.Module | None) -> bool:
    """Whether a block is only wrapped, as a compiled one is."""
    return former is not None and any(part is former for part in module.modules())
