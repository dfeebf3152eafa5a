"""Notice a model that trains past mimose: compiled as a whole, its blocks are never called.

The compiler takes a module's `forward` for its call, so that no interceptor is asked, and nothing
would tell. Two things do: the interceptor of the model, where it is itself compiled, and a gradient
that arrives although no block has ever run.
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
    "They are then planned for, and no plan compiles them again"
)


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model that is compiled as a whole already."""
    if hasattr(model, "_orig_mod") or model.__dict__.get("_compiled_call_impl") is not None:
        _refuse()


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model whose parameters have no shape yet."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ArgumentError(
                f"parameter {name!r} has no shape before the model has run: call the model once, "
                "under torch.no_grad(), then attach"
            )


def refuse_in_compiled_code() -> NoReturn:
    """Refuse from inside compiled code, which breaks off here and raises."""
    _refuse()


# What `torch.compiler.disable(reason=…)` sets. Calling that would import the compiler: 1.7 seconds
# in every program that imports mimose.
refuse_in_compiled_code._torchdynamo_disable = True  # type: ignore[attr-defined]
refuse_in_compiled_code._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    f"mimose cannot plan inside a compiled model: {_ADVICE}"
)


def _refuse() -> NoReturn:
    raise ConflictError(
        f"the model is compiled as a whole, so that its blocks are never called: {_ADVICE}"
    )


_TIMES = 3
"""How often a gradient arrives in eval mode before that is taken for training."""


class Tripwire:
    """Until the first step: says so when a gradient arrives although no block has run."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        self._model = weakref.ref(model)
        self._blocks = [weakref.ref(block.module) for block in blocks]
        self._in_eval = 0
        parameters = (p for block in blocks for p in block.module.parameters())
        trained = next((p for p in parameters if p.requires_grad and p.is_leaf), None)
        self._hook: Any = None
        if trained is not None:
            self._hook = trained.register_post_accumulate_grad_hook(self._arrives)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _arrives(self, _: torch.Tensor) -> None:
        model = self._model()
        if model is None:
            return
        blocks = [block for ref in self._blocks if (block := ref()) is not None]
        if not any(block.training for block in blocks):
            self._in_eval += 1
            if self._in_eval == _TIMES:
                self.close()
                warn(
                    "the model gets gradients in eval mode, where nothing is planned: call "
                    "model.train(), and put what is to stay as it is (dropout, norms) into eval "
                    "mode by itself"
                )
            return
        if not model.training:
            return
        self.close()
        warn(
            "the model trains, but none of its blocks was called as a module, so nothing is "
            f"planned. If it is compiled as a whole: {_ADVICE}. If their forward is called "
            "directly, or blocks= names modules that do not run: name those that do. If they run "
            "without gradients, in a stack that recomputes by itself (a reversible one): there is "
            "nothing to plan"
        )
