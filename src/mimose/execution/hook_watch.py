"""Hooks inside a block: which of them act in a forward, and forwards without some of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mimose.execution.attributes import MOVE_PARAMETERS
from mimose.tensors import tensors_in, version_of

Hook = tuple[nn.Module, int]
"""A module and the id of one of its forward hooks or forward pre-hooks."""


class HookWatch:
    """Finds out which hooks act in a forward: return something, or change a tensor in place."""

    def __init__(self) -> None:
        self.called: set[Hook] = set()
        self.acting: set[Hook] = set()

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Watch the forward hooks and forward pre-hooks of these modules."""
        with _hooks_replaced(modules, self._watched):
            yield

    def _watched(self, module: nn.Module, key: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        package = (getattr(hook, "__module__", None) or "").partition(".")[0]
        if package in MOVE_PARAMETERS:
            return hook

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = [(t, version_of(t)) for t in tensors_in((args, kwargs))]
            result = hook(*args, **kwargs)
            self.called.add((module, key))
            if result is not None or any(version_of(t) != version for t, version in before):
                self.acting.add((module, key))
            return result

        return watched


@contextmanager
def without_hooks(skipped: tuple[Hook, ...]) -> Iterator[None]:
    if not skipped:
        yield
        return
    modules = {module for module, _ in skipped}
    with _hooks_replaced(modules, lambda m, key, hook: None if (m, key) in skipped else hook):
        yield


@contextmanager
def _hooks_replaced(modules: Iterable[nn.Module], replace: Callable[..., Any]) -> Iterator[None]:
    """Replace each forward hook by `replace(module, key, hook)`, or remove it if that is None."""
    originals = [
        (module, kind, hooks)
        for module in modules
        for kind in ("_forward_hooks", "_forward_pre_hooks")
        if (hooks := getattr(module, kind))
    ]
    for module, kind, hooks in originals:
        replaced = [(key, replace(module, key, hook)) for key, hook in hooks.items()]
        vars(module)[kind] = OrderedDict((key, hook) for key, hook in replaced if hook is not None)
    try:
        yield
    finally:
        for module, kind, hooks in originals:
            vars(module)[kind] = hooks
