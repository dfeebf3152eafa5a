"""Run a piece of training again, as if it had not run before.

A forward and a backward change random number generators, buffers (such as BatchNorm's statistics),
attributes of blocks, sometimes frozen parameters, and gradients. What may change is copied before;
gradients are not (`FormerGradients`). Where something without a copy has changed, `obstacle` says
so, and the piece of training must not run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, not_

import torch
from torch import nn

from mimose.execution import OtherGenerators
from mimose.interception import BlockInterceptor
from mimose.tensors import Parameters, bytes_of
from mimose.training.former_buffers import FormerBuffers
from mimose.training.former_gradients import Additions, FormerGradients
from mimose.training.former_state import FormerState
from mimose.training.frozen_values import FrozenValues
from mimose.training.registrations import Registrations
from mimose.units import text_of

_is_trained, _version = attrgetter("requires_grad"), attrgetter("_version")


class Rewind:
    """The state of training at one moment, which `rewind` restores."""

    def __init__(self, store: RewindStore, interceptors: Sequence[BlockInterceptor] = ()) -> None:
        self._store = store
        store.take(interceptors)
        self._generators = [(g, g.get_state()) for g in store.generators]
        self._others = OtherGenerators(store.blocks.generators)
        parameters = store.parameters.current()
        is_trained = list(map(_is_trained, parameters))
        self._trained = list(compress(parameters, is_trained))
        self._versions = list(map(_version, self._trained))
        frozen = compress(parameters, map(not_, is_trained))
        store.frozen.take(list(filter(store.is_constant, frozen)))
        self._gradients = FormerGradients(parameters, store.additions)

    @property
    def obstacle(self) -> str | None:
        """Why the state cannot be restored; None if it can."""
        versions = zip(self._trained, self._versions, strict=True)
        if any(p._version != was and self._store.is_constant(p) for p, was in versions):
            return (
                "it has changed parameters: call optimizer.step() outside of the function that "
                "retry() calls"
            )
        lost = self._gradients.lost()
        if lost:
            return (
                f"it has replaced or changed {lost} gradients from before this step, other than "
                "by the additions of a backward: change gradients outside of the function that "
                "retry() calls"
            )
        changed = self._store.overwritten()
        if changed is None:
            return None
        what, tensor = changed
        return (
            f"its forward has changed a {what} of {text_of(bytes_of([tensor]))} in place, and no "
            "copy of the former value exists"
        )

    def rewind(self) -> None:
        """Restore the state; set aside gradients that were added to."""
        for generator, state in self._generators:
            generator.set_state(state)
        self._others.restore()
        self._store.give_back()
        self._gradients.rewind()
        self._store.refresh()  # the attempt may have added an adapter
        for parameter in self._trained + self._store.parameters.current():
            if parameter not in self._gradients:
                parameter.grad = None

    def settle(self) -> int:
        """End the attempts. Returns how many gradients contain what failed attempts have added."""
        spoiled = self._gradients.settle()
        self._store.release()
        return spoiled


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
        if self._registrations.any_since_last() or self.buffers.any_registered:
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
        self.additions.count([])
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
