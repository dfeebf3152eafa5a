"""Switch off the model's own checkpointing where that is safe; otherwise raise an error.

Two layers of checkpointing would recompute a block twice. `Takeover.undo` switches the model's own
checkpointing on again.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from mimose.errors import ConflictError
from mimose.interception.blocks import Block
from mimose.interception.other_offloading import refuse_offloaded_checkpointing

_WRAPPER_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def _is_wrapper(module: nn.Module, kind: str) -> bool:
    """Whether a module is torch's wrapper of this name.

    If torch's module of wrappers is not imported yet, no wrapper exists. Importing it takes long.
    """
    wrapper = getattr(sys.modules.get(_WRAPPER_MODULE), kind, None)
    return wrapper is not None and isinstance(module, wrapper)


class Takeover:
    """Switches off the model's own checkpointing around `blocks` until `undo`."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        self._undo: list[Callable[[], None]] = []
        related = _related(model, blocks)
        # Weak references, so that a handle does not keep its model alive.
        self._related = [(name, weakref.ref(module)) for name, module in related]
        flagged = (m for _, m in related if hasattr(m, "gradient_checkpointing"))
        self._flagged = [weakref.ref(module) for module in flagged]
        self.flags: list[str] = []
        self.wrappers: list[str] = []
        self.refresh()

    def refresh(self) -> bool:
        """Switch off checkpointing that was enabled since. Returns whether there was any."""
        related = [(name, m) for name, ref in self._related if (m := ref()) is not None]
        _refuse(related)
        flags = [name for name, module in related if self._switch_off_flag(module)]
        wrappers = [name for name, module in related if self._bypass_wrapper(module)]
        self.flags = list(dict.fromkeys(self.flags + flags))
        self.wrappers += wrappers
        return bool(flags or wrappers)

    @property
    def needs_refresh(self) -> bool:
        """Whether a flag was set again. Checked in every step: no block may be recomputed twice."""
        on = [m for r in self._flagged if getattr(m := r(), "gradient_checkpointing", False)]
        return any(hasattr(module, "_gradient_checkpointing_func") for module in on)

    def undo(self) -> None:
        """Restore the model's own checkpointing."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        taken = self.flags + self.wrappers
        return f"the model's own checkpointing of {len(taken)} modules ({taken[0]}, …)"

    def __bool__(self) -> bool:
        return bool(self.flags or self.wrappers)

    def _switch_off_flag(self, module: nn.Module) -> bool:
        """Clear the flag that transformers' `gradient_checkpointing_enable()` sets."""
        if not getattr(module, "gradient_checkpointing", False):
            return False
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is None:
            return False
        module.gradient_checkpointing = False  # type: ignore[assignment]

        def undo() -> None:
            # A later call that switches checkpointing on or off sets another function and wins.
            if module._gradient_checkpointing_func is function:
                module.gradient_checkpointing = True  # type: ignore[assignment]

        self._undo.append(undo)
        return True

    def _bypass_wrapper(self, module: nn.Module) -> bool:
        if not _is_wrapper(module, "CheckpointWrapper"):
            return False
        original: Any = module.checkpoint_fn
        if isinstance(original, _Bypass):
            return False
        module.checkpoint_fn = _Bypass(original)  # type: ignore[assignment]
        self._undo.append(lambda: setattr(module, "checkpoint_fn", original))
        return True


class _Bypass:
    """Replaces a wrapper's checkpoint function: calls the module. Pickles as the original."""

    def __init__(self, original: functools.partial[Any]) -> None:
        self.original = original

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.original.__reduce_ex__(protocol)


def refuse_other_checkpointing(model: nn.Module, blocks: list[Block]) -> None:
    """Raise if the model has checkpointing that cannot be switched off; changes nothing."""
    _refuse(_related(model, blocks))


def _related(model: nn.Module, blocks: list[Block]) -> list[tuple[str, nn.Module]]:
    """The blocks, their submodules, and the modules that contain them."""
    inside = {id(module) for block in blocks for module in block.module.modules()}
    block_ids = {id(block.module) for block in blocks}
    return [
        (name, module)
        for name, module in model.named_modules()
        if id(module) in inside or any(id(child) in block_ids for child in module.modules())
    ]


def _refuse(modules: list[tuple[str, nn.Module]]) -> None:
    for name, module in modules:
        refuse_offloaded_checkpointing(name, module)
        if _is_wrapper(module, "CheckpointWrapper"):
            if "context_fn" in getattr(module.checkpoint_fn, "keywords", {}):
                raise ConflictError(
                    f"{name!r} is checkpointed selectively (context_fn), which mimose would "
                    "override. Unwrap it, or do not attach mimose"
                )
        if _is_wrapper(module, "OffloadWrapper"):
            raise ConflictError(
                f"{name!r} offloads its activations to the CPU (offload_wrapper) in every step. "
                "mimose decides for each batch which activations move: unwrap it"
            )
