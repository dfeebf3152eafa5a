"""Hooks inside a block: which of them act in a forward, and forwards without some of them."""

from __future__ import annotations

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
    """Do not call these hooks meanwhile."""
    if not skipped:
        yield
        return
    modules = {module for module, _ in skipped}
    with _hooks_replaced(modules, lambda m, key, hook: _nothing if (m, key) in skipped else hook):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _hooks_replaced(modules: Iterable[nn.Module], replace: Callable[..., Any]) -> Iterator[None]:
    """Replace each forward hook and pre-hook by `replace(module, key, hook)`.

    They are replaced in their places: a hook may be removed, and others added, meanwhile.
    """
    originals = [
        (module, hooks, key, hook)
        for module in modules
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for key, hook in hooks.items()
    ]
    for module, hooks, key, hook in originals:
        hooks[key] = replace(module, key, hook)
    try:
        yield
    finally:
        for _, hooks, key, hook in originals:
            if key in hooks:
                hooks[key] = hook
