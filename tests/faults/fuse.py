"""Faults at a chosen moment: in a block's forward, its recompute, its backward, or the head."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.tensors.running_backward import task_id

PHASES = ("forward", "recompute", "backward", "head", "between")


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is none."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "out of memory": lambda: torch.OutOfMemoryError("the fuse is blown"),
    "out of memory, in words": lambda: RuntimeError("CUDA error: out of memory"),
    "an exception": lambda: ValueError("the fuse is blown"),
    "an interrupt": Interrupted,
}


class Fuse:
    """Hooks on a model's parts that raise when they are told to, as often as they are told to."""

    def __init__(self, blocks: list[nn.Module], head: nn.Module) -> None:
        self._blocks = [[*block.modules()][1:] for block in blocks]
        self._head = head
        self._phase = ""
        self._error: Callable[[], BaseException] = Interrupted
        self._left = 0
        self._hooks: list[Any] = []
        self.blown = 0

    def arm(self, dice: random.Random, phase: str, error: str, times: int) -> None:
        """From now on raise, in some part of some block."""
        self.disarm()
        self._phase, self._error, self._left = phase, ERRORS[error], times
        part = self._head if phase == "head" else dice.choice(dice.choice(self._blocks))
        self._hooks = [
            part.register_forward_pre_hook(self._before),
            part.register_forward_hook(self._after),
        ]

    def disarm(self) -> None:
        self._left, self.blown = 0, 0
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def between(self) -> None:
        """The forward is done, the backward has not begun."""
        if self._phase == "between":
            self._blow()

    def _before(self, *_: Any) -> None:
        again = task_id() != -1
        if self._phase == ("recompute" if again else "forward") or self._phase == "head":
            self._blow()

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if self._phase == "backward" and tensor.requires_grad and task_id() == -1:
            tensor.register_hook(lambda _: self._blow())

    def _blow(self) -> None:
        if self._left > 0:
            self._left -= 1
            self.blown += 1
            raise self._error()
