"""Run a piece of training once more, as if it had never run.

What a forward and a backward change besides memory: random number generators, buffers such as
BatchNorm's statistics, and gradients. Gradients need no copy. Those that came into being in the
failed attempt are dropped. Those that existed before and have been added to are set aside whole:
in the next attempt, once it has added as much again, they take the place of what it has added.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.execution import may_change
from mimose.tensors import Parameters


class Rewind:
    """The state at one moment, and the way back to it."""

    def __init__(self, kept: RewindStore) -> None:
        self._generators = [(g, g.get_state()) for g in kept.generators]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._kept = kept
        kept.take()
        parameters = kept.parameters.current()
        self._parameters = [(p, p._version) for p in parameters if p.requires_grad]
        self._had_one = {id(p): p for p in parameters if p.grad is not None}
        self._gradients = [_Gradient(p) for p in self._had_one.values() if p.requires_grad]
        kept.additions.count(self._gradients)

    @property
    def possible(self) -> bool:
        """Whether there is a way back: not if an optimizer has changed parameters since."""
        constant = self._kept.is_constant
        return all(p._version == version for p, version in self._parameters if constant(p))

    def rewind(self) -> None:
        """Back to that moment; gradients that have grown since wait for the next attempt."""
        for generator, state in self._generators:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._kept.give_back()
        for gradient in self._gradients:
            gradient.rewind()
        self._kept.parameters.refresh()  # an adapter added in the attempt has gradients as well
        for parameter in [p for p, _ in self._parameters] + self._kept.parameters.current():
            if id(parameter) not in self._had_one:
                parameter.grad = None

    def settle(self) -> int:
        """No attempt will follow; how many gradients hold what failed attempts have added."""
        for gradient in self._gradients:
            gradient.settle()
        self._kept.release()
        return sum(gradient.added > 0 for gradient in self._gradients)


class _Gradient:
    """A gradient that existed at the start, and how often it has been added to since."""

    __slots__ = ("_aside", "_left", "_ref", "added", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        # Held weakly: gradients that are cleared between forward and backward are to be freed.
        self._ref = weakref.ref(parameter.grad)
        self._aside: torch.Tensor | None = None
        self._left = 0
        self.added = 0

    def was_added_to(self) -> None:
        """A backward has added something to the parameter's gradient."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._put_back()
        elif self.parameter.grad is self._ref():
            self.added += 1

    def rewind(self) -> None:
        """It waits until the next attempt has added as often; cleared in between, it is gone."""
        gradient = self.parameter.grad = self._ref()
        if gradient is None:
            self.added = 0
        if self.added:
            self._aside, self._left = gradient, self.added
            self.parameter.grad = None

    def settle(self) -> None:
        if self._left:
            self._put_back()

    def _put_back(self) -> None:
        self.parameter.grad, self._aside, self._left = self._aside, None, 0


class Additions:
    """Hears of every addition to gradients that existed when a piece of training began."""

    def __init__(self) -> None:
        self._counted: dict[torch.Tensor, _Gradient] = {}
        self._hooks: dict[nn.Parameter, Any] = {}

    def count(self, gradients: Iterable[_Gradient]) -> None:
        """From now on, tell these."""
        self._counted = {gradient.parameter: gradient for gradient in gradients}
        for gradient in self._counted.values():
            parameter = gradient.parameter
            if parameter not in self._hooks:  # once for all steps: it takes microseconds each
                hook = parameter.register_post_accumulate_grad_hook(self._note)
                self._hooks[parameter] = hook

    def _note(self, parameter: torch.Tensor) -> None:
        gradient = self._counted.get(parameter)
        if gradient is not None:
            gradient.was_added_to()

    def close(self) -> None:
        self._counted = {}
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}


class RewindStore:
    """What serves every restart: generators, room for buffers' values, the count of additions."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generators.append(torch.cuda.default_generators[index])
        self.additions = Additions()
        # Held weakly, as by everything that a handle has: a model that is dropped is gone.
        self.parameters = Parameters(model)
        self._modules = [weakref.ref(module) for module in model.modules() if module._buffers]
        self._former: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        self._values: list[torch.Tensor] = []
        self._renormed = {
            module.weight
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        }

    def is_constant(self, parameter: nn.Parameter) -> bool:
        """Whether a forward leaves it as it is; an embedding with `max_norm` scales its rows."""
        return parameter not in self._renormed

    def take(self) -> None:
        """Remember the buffers, and the present values of those that may change."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        self._former = [(module, dict(module._buffers)) for module in modules]
        present = self._changing()
        if [_kind(value) for value in self._values] != [_kind(buffer) for buffer in present]:
            self._values = [buffer.clone() for buffer in present]
        elif present:
            _copy_all(self._values, present)

    def give_back(self) -> None:
        """The same buffers with the same values are where they were."""
        for module, buffers in self._former:
            module._buffers.clear()
            module._buffers.update(buffers)
        present = self._changing()
        if present:
            _copy_all(present, self._values)

    def release(self) -> None:
        """Hold on to nothing of the step."""
        self.additions.count(())
        self._former = []

    def close(self) -> None:
        """No restart will follow."""
        self.release()
        self.additions.close()
        self.parameters = Parameters(nn.Module())
        self._modules, self._values, self._renormed = [], [], set()

    def _changing(self) -> list[torch.Tensor]:
        return [
            buffer
            for module, buffers in self._former
            for buffer in buffers.values()
            if buffer is not None and may_change(module, buffer)
        ]


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _copy_all(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Many small copies in one launch for each type, where torch can."""
    together = getattr(torch, "_foreach_copy_", None)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault((value.dtype, value.device), []).append(i)
    with torch.no_grad():
        for group in groups.values():
            targets, sources = [to[i] for i in group], [values[i] for i in group]
            if together is not None:
                together(targets, sources)
            else:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
