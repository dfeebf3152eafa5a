"""Run a piece of training again, as if it had not run before.

A forward and a backward change random number generators, buffers (such as BatchNorm's statistics),
attributes of blocks, sometimes frozen parameters, and gradients. What may change is copied before;
gradients are not (see `_Gradient`). Where something without a copy has changed, `obstacle` says
so, and the piece of training must not run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mimose.execution import OtherGenerators
from mimose.interception import BlockInterceptor
from mimose.tensors import Parameters
from mimose.training.former_buffers import FormerBuffers
from mimose.training.former_state import FormerState
from mimose.training.frozen_values import FrozenValues
from mimose.training.registrations import Registrations
from mimose.units import text_of


class Rewind:
    """The state of training at one moment, which `rewind` restores."""

    def __init__(self, store: RewindStore, interceptors: Sequence[BlockInterceptor] = ()) -> None:
        self._store = store
        store.take(interceptors)
        self._generators = [(g, g.get_state()) for g in store.generators]
        self._others = OtherGenerators(store.blocks.generators)
        parameters = store.parameters.current()
        self._parameters = [(p, p._version) for p in parameters if p.requires_grad]
        store.frozen.take([p for p in parameters if not p.requires_grad and store.is_constant(p)])
        self._with_gradient = {id(p): p for p in parameters if p.grad is not None}
        self._gradients = [_Gradient(p) for p in self._with_gradient.values() if p.requires_grad]
        store.additions.count(self._gradients)

    @property
    def obstacle(self) -> str | None:
        """Why the state cannot be restored; None if it can."""
        constant = self._store.is_constant
        if any(p._version != version for p, version in self._parameters if constant(p)):
            return (
                "it has changed parameters: call optimizer.step() outside of the function that "
                "retry() calls"
            )
        changed = self._store.overwritten()
        if changed is None:
            return None
        what, tensor = changed
        return (
            f"its forward has changed a {what} of {text_of(tensor.nbytes)} in place, and no copy "
            "of the former value exists"
        )

    def rewind(self) -> None:
        """Restore the state; set aside gradients that were added to."""
        for generator, state in self._generators:
            generator.set_state(state)
        self._others.restore()
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
        self.frozen = FrozenValues()
        self.buffers = FormerBuffers()
        self.blocks = FormerState()
        self._registrations = Registrations()
        self._look_for_modules(model)

    def refresh(self) -> None:
        """The model may have other parameters and modules than before, such as an adapter."""
        self.parameters.refresh()
        model = self._model()
        if model is not None:
            self._look_for_modules(model)

    def _look_for_modules(self, model: nn.Module) -> None:
        self.buffers.look_for_modules(model)
        self._renormed = {
            module.weight
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        }

    def is_constant(self, parameter: nn.Parameter) -> bool:
        """Whether forwards leave it unchanged; an embedding with `max_norm` scales its rows."""
        return parameter not in self._renormed

    def take(self, interceptors: Sequence[BlockInterceptor]) -> None:
        """Store the buffers, and what blocks change besides."""
        if self._registrations.any_since_last():
            self.refresh()
        self.blocks = FormerState(interceptors)
        self.buffers.take(interceptors)

    def give_back(self) -> None:
        """Restore buffers, frozen parameters, and what blocks have changed."""
        self.buffers.give_back()
        self.frozen.give_back()
        self.blocks.give_back()

    def overwritten(self) -> tuple[str, torch.Tensor] | None:
        """A tensor that was changed in place and not copied before, and what it is."""
        for what, tensor in (
            ("buffer", self.buffers.overwritten()),
            ("frozen parameter", self.frozen.overwritten()),
            ("tensor", self.blocks.overwritten()),
        ):
            if tensor is not None:
                return what, tensor
        return None

    def release(self) -> None:
        """Release all references to the step."""
        self.additions.count(())
        self.buffers.release()
        self.frozen.release()
        self.blocks = FormerState()

    def close(self) -> None:
        """Release everything; no further step is restarted."""
        self.release()
        self.additions.close()
        self._registrations.close()
        self.parameters = Parameters(nn.Module())
        self.frozen, self.buffers, self._renormed = FrozenValues(), FormerBuffers(), set()
