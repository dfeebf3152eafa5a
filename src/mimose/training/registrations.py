"""Notices that modules were put into others, so that a model need not be searched each time."""

from __future__ import annotations

import weakref
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

_CALLS_BETWEEN_CHECKS = 64
"""Every so many calls count as if there was one, since code may write to `_modules` directly."""


class Registrations:
    """Whether modules may have been put into others, anywhere, since the last call."""

    def __init__(self) -> None:
        self._any = False
        self._calls = 0
        own = weakref.ref(self)

        def note_registration(*_: Any) -> None:
            if (registrations := own()) is not None:
                registrations._any = True

        hook = register_module_module_registration_hook(note_registration)
        self.close = weakref.finalize(self, hook.remove)
        self.close.atexit = False

    def any_since_last(self) -> bool:
        self._calls += 1
        found = self._any or self._calls % _CALLS_BETWEEN_CHECKS == 0
        self._any = False
        return found
