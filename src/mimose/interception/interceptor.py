"""Intercept the calls of a module.

A call of an `nn.Module` goes to `_compiled_call_impl` if that is set. Copies and pickles omit this
attribute. An interceptor is stored there, so the module keeps its type, its `state_dict` keys, its
parameter names and its hooks, and `deepcopy` and `torch.save` see a plain model. A block compiled
with `block.compile()` stays compiled: the interceptor wraps the compiled call, and the compiler
never sees the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from mimose.errors import ConflictError
from mimose.execution import hide_from_compiler


class Interceptor:
    """Replaces a module's own call from `install` until `remove`."""

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
        """Intercept calls from now on. Call it again to wrap a compiled call that was set since."""
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
        """Whether this interceptor receives the module's calls."""
        module = self._module()
        return module is not None and module.__dict__.get("_compiled_call_impl") is self

    def remove(self) -> None:
        """Restore the module's own call, compiled or not."""
        module = self._module()
        if module is None or module.__dict__.get("_compiled_call_impl") is not self:
            return
        if self.compiled is None:
            del module.__dict__["_compiled_call_impl"]
        else:
            module.__dict__["_compiled_call_impl"] = self.compiled

    def plain(self, args: Any, kwargs: Any) -> Any:
        """Call the module without mimose."""
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return self.module._call_impl(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A module with its own __getstate__ may copy the attribute. The copy gets None, which
        # means "not compiled".
        return type(None), ()


_peek_transform: Callable[[], Any] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)


def under_transform() -> bool:
    """Whether `torch.func` or forward-mode AD transforms this call, or it is being traced.

    Nothing can be planned then.
    """
    if _peek_transform() is not None or torch._C._get_tracing_state() is not None:
        return True
    return getattr(forward_ad, "_current_level", -1) >= 0
