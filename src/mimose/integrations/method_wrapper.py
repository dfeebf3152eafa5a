"""Replace a method of one object, and put it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class MethodWrapper:
    """Replaces one method of one trainer until `remove`.

    `replacement` is called with the method that was there before, then with the call's arguments.
    """

    def __init__(
        self, owner: Any, trainer: object, name: str, replacement: Callable[..., Any]
    ) -> None:
        self.owner = owner
        """Where this wrapper belongs; a later one takes its place."""
        self._attributes, self._name = vars(trainer), name
        self._former = self._attributes.get(name)
        plain = getattr(trainer, name)
        self._call = functools.partial(replacement, plain)
        functools.update_wrapper(self, plain)
        self._attributes[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        """Put the former method back."""
        if self._attributes.get(self._name) is not self:  # wrapped again by something else
            return
        if self._former is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._former
