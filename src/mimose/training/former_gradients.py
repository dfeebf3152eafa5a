"""Gradients from before a piece of training, which is about to run again.

They are not copied. A gradient that a failed attempt has added to is set aside as it is. When the
next attempt has added to the parameter's gradient as often, the gradient that was set aside takes
the place of the new sum: it contains the same additions already.

So the additions of backwards are counted, and a gradient that was changed otherwise cannot be
restored. Its version shows that. Only clearing is harmless, because the next attempt clears again:
a change in place before the first addition counts as clearing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mimose.tensors import local_tensor


class FormerGradient:
    """A gradient that existed at the start, and the number of additions to it since.

    `hold` keeps a gradient that the step may replace, as `backward(create_graph=True)` does. Other
    gradients are held weakly: if they are cleared between forward and backward, they are freed.
    """

    __slots__ = (
        "_additions_left",
        "_aside",
        "_cleared",
        "_former",
        "_held",
        "_lost",
        "_version",
        "added",
    )

    def __init__(self, gradient: torch.Tensor, *, hold: bool = False) -> None:
        self._former: Callable[[], torch.Tensor | None] = weakref.ref(gradient)
        self._held = gradient if hold else None
        self._aside: torch.Tensor | None = None
        self._additions_left = 0
        self._version = _version(gradient)
        self._cleared = self._lost = False
        self.added = 0

    def was_added_to(self, parameter: torch.Tensor) -> None:
        """A backward has added to the parameter's gradient."""
        if self._additions_left:
            self._additions_left -= 1
            if not self._additions_left:
                self._put_back(parameter)
            return
        former = self._former()
        if former is None:
            # With grad mode on, the sum of both has replaced the former gradient.
            replaced = not self._cleared and (self.added > 0 or torch.is_grad_enabled())
            self._lost |= replaced
            self._cleared |= not replaced
        elif parameter.grad is former:
            version = _version(former)
            self._lost |= self.added > 0 and version not in (None, _next(self._version))
            self._version = version
            self.added += 1

    def is_lost(self, parameter: nn.Parameter) -> bool:
        """Whether it was replaced, or changed otherwise than by the additions counted."""
        former = self._former()
        if self._lost or self._cleared:
            return self._lost
        if former is None:
            return parameter.grad is not None
        return _version(former) != self._version and not _is_zero(former)

    def rewind(self, parameter: nn.Parameter) -> None:
        """Set the gradient aside until the next attempt has added to it as often as this one.

        If it was cleared meanwhile, there is nothing to restore. If it is lost, it is left alone.
        """
        self._lost = self.is_lost(parameter)
        if self._lost:
            return
        former = parameter.grad = self._former()
        self._cleared = former is None
        if former is None or _version(former) != self._version:
            self.added = 0
        if former is not None:
            self._version = _version(former)
        if self.added:
            self._aside, self._additions_left = former, self.added
            parameter.grad = None

    def settle(self, parameter: nn.Parameter) -> bool:
        """End the attempts: put the gradient back if it is still set aside.

        Returns whether it contains what failed attempts have added, or is lost.
        """
        if self._additions_left:
            self._put_back(parameter)
        return self._lost or self.added > 0

    def _put_back(self, parameter: torch.Tensor) -> None:
        parameter.grad, self._aside, self._additions_left = self._aside, None, 0


def _version(gradient: torch.Tensor) -> int | None:
    """The gradient's version; None for a view: views of one buffer share a version."""
    if type(gradient) is not torch.Tensor:  # else it has no shards
        gradient = local_tensor(gradient)
    return None if gradient._is_view() else gradient._version


def _next(version: int | None) -> int | None:
    return None if version is None else version + 1


def _is_zero(gradient: torch.Tensor) -> bool:
    gradient = local_tensor(gradient.detach())
    values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
    return not bool((values != 0).any())


class FormerGradients:
    """The gradients that exist when a piece of training begins."""

    def __init__(self, parameters: Iterable[nn.Parameter], additions: Additions) -> None:
        present = [(p, g) for p in parameters if (g := p.grad) is not None]
        self._parameters = frozenset([id(p) for p, _ in present])
        # A gradient with a graph is that of a step with create_graph=True; so will the next be.
        hold = any(g.requires_grad for _, g in present)
        self._gradients = [(p, FormerGradient(g, hold=hold)) for p, g in present if p.requires_grad]
        additions.count(self._gradients)
        self._any_aside = False

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter had a gradient, trained or not."""
        return id(parameter) in self._parameters

    def lost(self) -> int:
        """How many cannot be restored."""
        return sum(gradient.is_lost(p) for p, gradient in self._gradients)

    def rewind(self) -> None:
        """Set those aside that were added to."""
        self._any_aside = True
        for parameter, gradient in self._gradients:
            gradient.rewind(parameter)

    def settle(self) -> int:
        """End the attempts. Returns how many gradients are lost, or contain what failed attempts
        have added."""
        if not self._any_aside:  # the first attempt was the last one
            return 0
        return sum([gradient.settle(p) for p, gradient in self._gradients])


class Additions:
    """Counts the additions to gradients that existed when a piece of training began."""

    def __init__(self) -> None:
        self._counted: dict[int, FormerGradient] = {}
        """By the id of the parameter: hashing a tensor runs Python code."""
        self._hooks: dict[int, tuple[nn.Parameter, Any]] = {}

    def count(self, gradients: Sequence[tuple[nn.Parameter, FormerGradient]]) -> None:
        """Count additions to these gradients from now on."""
        self._counted = {id(parameter): gradient for parameter, gradient in gradients}
        for parameter, _ in gradients:
            if id(parameter) not in self._hooks:  # stays: adding one takes microseconds
                hook = parameter.register_post_accumulate_grad_hook(self._count_addition)
                self._hooks[id(parameter)] = parameter, hook

    def _count_addition(self, parameter: torch.Tensor) -> None:
        gradient = self._counted.get(id(parameter))
        if gradient is not None:
            gradient.was_added_to(parameter)

    def close(self) -> None:
        self._counted = {}
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
