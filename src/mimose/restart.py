"""Run a piece of training once more, as if it had never run.

What a forward and a backward change besides memory: random number generators, buffers such as
BatchNorm's statistics, and gradients. Gradients need no copy. A backward adds to each parameter's
gradient once, and counts it in the tensor's version; so after a failure the ones that were added to
already are set aside whole, and in the next attempt they take the place of what that adds anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.buffers import Place


class Restart:
    """The state at one moment, and the way back to it."""

    def __init__(self, parameters: Sequence[nn.Parameter], kept: Keepsake) -> None:
        self._generators = [(g, g.get_state()) for g in kept.generators]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._kept = kept
        kept.take()
        self._parameters = parameters
        self._gradients = {
            p: (gradient, gradient._version) for p in parameters if (gradient := p.grad) is not None
        }
        self._aside: list[_Aside] = []

    def rewind(self) -> None:
        """Back to that moment; gradients that have grown since wait for the next attempt."""
        for generator, state in self._generators:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._kept.give_back()
        for aside in self._aside:
            aside.rewind()
        waiting = {aside.parameter for aside in self._aside}
        for parameter in self._parameters:
            if parameter not in waiting:
                self._rewind_gradient(parameter)

    def settle(self) -> None:
        """The attempt has succeeded."""
        for aside in self._aside:
            aside.settle()

    def _rewind_gradient(self, parameter: nn.Parameter) -> None:
        gradient, version = self._gradients.get(parameter, (None, 0))
        added = 0 if gradient is None else gradient._version - version
        parameter.grad = gradient
        if gradient is not None and added:
            self._aside.append(_Aside(parameter, gradient, added))


class _Aside:
    """A gradient that has been added to `added` times, while an attempt adds the same anew."""

    def __init__(self, parameter: nn.Parameter, gradient: torch.Tensor, added: int) -> None:
        self.parameter = parameter
        self._gradient = gradient
        self._added = added
        self._hook: Any = None
        self._begin()

    def _begin(self) -> None:
        self._left = self._added
        self._version = self._gradient._version
        self.parameter.grad = None
        self._hook = self.parameter.register_post_accumulate_grad_hook(self._count)

    def _count(self, parameter: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            parameter.grad = self._gradient

    def rewind(self) -> None:
        """The attempt has failed, too."""
        self._hook.remove()
        if self._left <= 0:
            self._added += self._gradient._version - self._version
        self._begin()

    def settle(self) -> None:
        self._hook.remove()
        if self._left > 0:
            self.parameter.grad = self._gradient


class Keepsake:
    """Generators, and buffers that training changes, with room for their values."""

    def __init__(self, device: torch.device, places: Iterable[Place]) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generators.append(torch.cuda.default_generators[index])
        self._places = list(dict.fromkeys(places))
        self._values: list[torch.Tensor] = []

    def take(self) -> None:
        """Remember the buffers' present values."""
        present = self._present()
        if [v.shape for v in self._values] != [b.shape for b in present]:
            self._values = [buffer.clone() for buffer in present]
        elif present:
            _copy_all(self._values, present)

    def give_back(self) -> None:
        """The buffers are as they were."""
        present = self._present()
        if present:
            _copy_all(present, self._values)

    def _present(self) -> list[torch.Tensor]:
        buffers = (module._buffers.get(name) for module, name in self._places)
        return [buffer for buffer in buffers if buffer is not None]


def _copy_all(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Many small copies in one launch, where torch can."""
    together = getattr(torch, "_foreach_copy_", None)
    with torch.no_grad():
        if together is not None:
            together(to, values)
        else:
            for target, value in zip(to, values, strict=True):
                target.copy_(value)
