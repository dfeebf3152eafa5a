"""Intercept the calls of a module.

`nn.Module` calls whatever `_compiled_call_impl` holds before anything else, and leaves that
attribute out of copies and pickles. An interceptor goes there. The module keeps its type, its
`state_dict` keys, its parameter names and its hooks; `deepcopy` and `torch.save` see a plain model;
and a block compiled with `block.compile()` stays compiled, since the interceptor is above the
compiled call and the compiler never sees the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.errors import ConflictError
from mimose.execution import hide_from_compiler


class Interceptor:
    """Called instead of a module's own call, from `install` to `remove`."""

    __slots__ = ("__weakref__", "_module", "compiled")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.compiled: Callable[..., Any] | None = None

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ConflictError("the model that mimose was attached to is gone")
        return module

    @property
    def module_if_alive(self) -> nn.Module | None:
        return self._module()

    def install(self) -> None:
        """Intercept calls from now on, also above a compiled call that was put there since."""
        place = self.module.__dict__
        occupant = place.get("_compiled_call_impl")
        if occupant is not self:
            if isinstance(occupant, Interceptor):
                occupant = occupant.compiled
            self.compiled = occupant
            if occupant is not None:
                hide_from_compiler()
            place["_compiled_call_impl"] = self

    @property
    def installed(self) -> bool:
        """Whether the module's calls come here."""
        module = self._module()
        return module is not None and module.__dict__.get("_compiled_call_impl") is self

    def remove(self) -> None:
        """The module is as before."""
        module = self._module()
        if module is None or module.__dict__.get("_compiled_call_impl") is not self:
            return
        if self.compiled is None:
            del module.__dict__["_compiled_call_impl"]
        else:
            module.__dict__["_compiled_call_impl"] = self.compiled

    def plain(self, args: Any, kwargs: Any) -> Any:
        """The module's own call."""
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return self.module._call_impl(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A module with a __getstate__ of its own may copy the attribute: "not compiled" it is then.
        return type(None), ()


_peek_transform: Callable[[], Any] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)


def under_transform() -> bool:
    """Whether `torch.func` transforms this call, or it is traced: nothing can be planned there."""
    return _peek_transform() is not None or torch._C._get_tracing_state() is not None
