"""Run a piece of training again, as if it had not run before.

A forward and a backward change random number generators, buffers (such as BatchNorm's statistics)
and gradients. Gradients are not copied. New gradients of the failed attempt are dropped. Gradients
that existed before, and were added to, are set aside as they are. When the next attempt has added
to a gradient as often, the gradient that was set aside takes the place of the new sum: it contains
the same additions already.
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
    """The state of training at one moment, which `rewind` restores."""

    def __init__(self, store: RewindStore) -> None:
        self._generators = [(g, g.get_state()) for g in store.generators]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._store = store
        store.take()
        parameters = store.parameters.current()
        self._parameters = [(p, p._version) for p in parameters if p.requires_grad]
        self._with_gradient = {id(p): p for p in parameters if p.grad is not None}
        self._gradients = [_Gradient(p) for p in self._with_gradient.values() if p.requires_grad]
        store.additions.count(self._gradients)

    @property
    def possible(self) -> bool:
        """Whether the state can be restored; not if an optimizer has changed parameters since."""
        constant = self._store.is_constant
        return all(p._version == version for p, version in self._parameters if constant(p))

    def rewind(self) -> None:
        """Restore the state; set aside gradients that were added to."""
        for generator, state in self._generators:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._store.give_back()
        for gradient in self._gradients:
            gradient.rewind()
        self._store.refresh()  # the attempt may have added an adapter
        for parameter in [p for p, _ in self._parameters] + self._store.parameters.current():
            if id(parameter) not in self._with_gradient:
                parameter.grad = None

    def settle(self) -> int:
        """End the attempts. Returns how many gradients contain what failed attempts have added."""
        for gradient in self._gradients:
            gradient.settle()
        self._store.release()
        return sum(gradient.added > 0 for gradient in self._gradients)


class _Gradient:
    """A gradient that existed at the start, and the number of additions to it since."""

    __slots__ = ("_additions_left", "_aside", "_ref", "added", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        # A weak reference, so that gradients cleared between forward and backward are freed.
        self._ref = weakref.ref(parameter.grad)
        self._aside: torch.Tensor | None = None
        self._additions_left = 0
        self.added = 0

    def was_added_to(self) -> None:
        """A backward has added to the parameter's gradient."""
        if self._additions_left:
            self._additions_left -= 1
            if not self._additions_left:
                self._put_back()
        elif self.parameter.grad is self._ref():
            self.added += 1

    def rewind(self) -> None:
        """Set the gradient aside until the next attempt has added to it as often as this one.

        If it was cleared meanwhile, there is nothing to restore.
        """
        gradient = self.parameter.grad = self._ref()
        if gradient is None:
            self.added = 0
        if self.added:
            self._aside, self._additions_left = gradient, self.added
            self.parameter.grad = None

    def settle(self) -> None:
        """End the attempts: put the gradient back if it is still set aside."""
        if self._additions_left:
            self._put_back()

    def _put_back(self) -> None:
        self.parameter.grad, self._aside, self._additions_left = self._aside, None, 0


class Additions:
    """Counts the additions to gradients that existed when a piece of training began."""

    def __init__(self) -> None:
        self._counted: dict[torch.Tensor, _Gradient] = {}
        self._hooks: dict[nn.Parameter, Any] = {}

    def count(self, gradients: Iterable[_Gradient]) -> None:
        """Count additions to these gradients from now on."""
        self._counted = {gradient.parameter: gradient for gradient in gradients}
        for gradient in self._counted.values():
            parameter = gradient.parameter
            if parameter not in self._hooks:  # stays for all steps: adding one takes microseconds
                hook = parameter.register_post_accumulate_grad_hook(self._count_addition)
                self._hooks[parameter] = hook

    def _count_addition(self, parameter: torch.Tensor) -> None:
        gradient = self._counted.get(parameter)
        if gradient is not None:
            gradient.was_added_to()

    def close(self) -> None:
        self._counted = {}
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}


class RewindStore:
    """The parts of a `Rewind` that are reused: generators, copies of buffers, gradient hooks."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generators.append(torch.cuda.default_generators[index])
        self.additions = Additions()
        # The model and its parameters are held weakly: no part of a handle keeps the model alive.
        self._model = weakref.ref(model)
        self.parameters = Parameters(model)
        self._former: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        self._values: list[torch.Tensor] = []
        self._look_for_modules(model)

    def refresh(self) -> None:
        """The model may have other parameters and modules than before, such as an adapter."""
        self.parameters.refresh()
        model = self._model()
        if model is not None:
            self._look_for_modules(model)

    def _look_for_modules(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules() if module._buffers]
        self._renormed = {
            module.weight
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        }

    def is_constant(self, parameter: nn.Parameter) -> bool:
        """Whether forwards leave it unchanged; an embedding with `max_norm` scales its rows."""
        return parameter not in self._renormed

    def take(self) -> None:
        """Store the buffers, and copies of those that may change."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        self._former = [(module, dict(module._buffers)) for module in modules]
        present = self._changing()
        if [_kind(value) for value in self._values] != [_kind(buffer) for buffer in present]:
            self._values = [buffer.clone() for buffer in present]
        elif present:
            _copy_all(self._values, present)

    def give_back(self) -> None:
        """Restore the stored buffers and their values."""
        for module, buffers in self._former:
            module._buffers.clear()
            module._buffers.update(buffers)
        present = self._changing()
        if present:
            _copy_all(present, self._values)

    def release(self) -> None:
        """Release all references to the step."""
        self.additions.count(())
        self._former = []

    def close(self) -> None:
        """Release everything; no further step is restarted."""
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
    """Copy all tensors, with one launch for each dtype and device if torch supports it."""
    foreach_copy = getattr(torch, "_foreach_copy_", None)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault((value.dtype, value.device), []).append(i)
    with torch.no_grad():
        for group in groups.values():
            targets, sources = [to[i] for i in group], [values[i] for i in group]
            if foreach_copy is not None:
                foreach_copy(targets, sources)
            else:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
