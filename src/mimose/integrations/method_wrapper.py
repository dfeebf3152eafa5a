"""Replace a method of one object until it is restored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class MethodWrapper:
    """Replaces one method of one trainer until `remove`.

    `replacement` is called with the former method, followed by the arguments of the call.
    """

    def __init__(
        self, owner: Any, trainer: object, name: str, replacement: Callable[..., Any]
    ) -> None:
        self.owner = owner
        """The object that installed this wrapper; replacing the wrapper disables it."""
        self._attributes, self._name = vars(trainer), name
        self._former_attribute = self._attributes.get(name)
        method = getattr(trainer, name)
        self._call = functools.partial(replacement, method)
        functools.update_wrapper(self, method)
        self._attributes[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        """Put the former method back."""
        if self._attributes.get(self._name) is not self:  # wrapped again by something else
            return
        if self._former_attribute is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._former_attribute
