"""Detect a model that bypasses mimose because it is compiled as a whole.

The compiler inlines each module's `forward`, so no interceptor of a block is called. Two checks
detect this: the interceptor of the model is being compiled, or a gradient arrives although no block
has run.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import nn

from mimose.errors import ArgumentError, ConflictError, warn
from mimose.interception.blocks import Block

_ADVICE = (
    "compile its blocks instead, before or after attaching: `for block in …: block.compile()`. "
    "mimose then plans for them, and a change of plan does not recompile them"
)


def refuse_compiled(model: nn.Module) -> None:
    """Raise if the model is compiled as a whole."""
    if hasattr(model, "_orig_mod") or model.__dict__.get("_compiled_call_impl") is not None:
        _refuse()


def refuse_lazy(model: nn.Module) -> None:
    """Raise if a parameter has no shape yet."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ArgumentError(
                f"parameter {name!r} has no shape before the model has run: call the model once, "
                "under torch.no_grad(), then attach"
            )


def refuse_in_compiled_code() -> NoReturn:
    """Raise from inside compiled code. The compiler inserts a graph break here."""
    _refuse()


# These are the attributes that `torch.compiler.disable(reason=…)` sets. Calling it would import the
# compiler, which takes 1.7 seconds.
refuse_in_compiled_code._torchdynamo_disable = True  # type: ignore[attr-defined]
refuse_in_compiled_code._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    f"mimose cannot plan inside a compiled model: {_ADVICE}"
)


def _refuse() -> NoReturn:
    raise ConflictError(
        f"the model is compiled as a whole, so its blocks are never called: {_ADVICE}"
    )


_GRADIENTS_IN_EVAL = 3
"""How many gradients must arrive in eval mode before it counts as training."""


class BypassDetector:
    """Warns if a gradient arrives although no block has run. Close it at the first step."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        self._model = weakref.ref(model)
        self._blocks = [weakref.ref(block.module) for block in blocks]
        self._gradients_in_eval = 0
        parameters = (p for block in blocks for p in block.module.parameters())
        trained = next((p for p in parameters if p.requires_grad and p.is_leaf), None)
        self._hook: Any = None
        if trained is not None:
            self._hook = trained.register_post_accumulate_grad_hook(self._gradient_arrived)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _gradient_arrived(self, _: torch.Tensor) -> None:
        model = self._model()
        if model is None:
            return
        blocks = [block for ref in self._blocks if (block := ref()) is not None]
        if not any(block.training for block in blocks):
            self._gradients_in_eval += 1
            if self._gradients_in_eval == _GRADIENTS_IN_EVAL:
                self.close()
                warn(_EVAL_MODE)
        elif model.training:
            self.close()
            warn(_NOT_CALLED)


_EVAL_MODE = (
    "the model gets gradients in eval mode, where mimose plans nothing: call model.train(), then "
    "put single modules that should stay in eval mode (dropout, norms) into it"
)
_NOT_CALLED = (
    "the model trains, but none of its blocks was called as a module, so nothing is planned. If "
    "the model is compiled as a whole, compile its blocks instead: `for block in …: "
    "block.compile()`. Other causes: docs/troubleshooting.md"
)
