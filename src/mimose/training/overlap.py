"""Steps of several handles that are open at once, as those of a GAN are.

The discriminator's step lies inside of the generator's: it begins after the generator's forward and
is through before the generator's backward. What one of them keeps is memory that the other finds.
So that each can plan for itself:

- A step inside of one that is observed keeps nothing. The outer one then measures the inner one at
  its least, and its plan leaves room for that; the inner one keeps what fits into the rest.
- The outer one's backward is no part of what the inner one costs: its own plan counts for that.
- Both are expected to peak where the higher of their predictions does.
- Where the outer one goes on before the inner one's backward is through (two losses, one backward
  after the other), what the inner one keeps comes on top of all that the outer one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch

from mimose.training.step import Step

_GIVEN_UP = 16
"""After how many steps in a row without a backward a handle's next ones are not waited for."""


class Overlap:
    """One handle's open step among those of the others."""

    _all: ClassVar[set[weakref.ref[Overlap]]] = set()
    """Those of all handles that train. Not a WeakSet, whose length takes time in every step."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._device: torch.device | None = None
        self._without_backward = 0
        self._interrupted = False
        """Whether steps of others have gone on amid one of this handle, so that they may again."""
        self.interrupts = False
        """Whether a step of this handle has gone on amid one of others."""

    def around(self, device: torch.device) -> list[Step]:
        """The steps of others that wait for their backward while one of this handle begins."""
        self._close()
        if self._device != device:
            self._device = device
            self._all.add(weakref.ref(self, self._all.discard))
        return self._of_others() if len(self._all) > 1 else []

    def _of_others(self) -> list[Step]:
        alive = [one for ref in self._all if (one := ref()) is not None]
        others = [one for one in alive if one is not self and one._device == self._device]
        return [step for one in others if (step := one._waiting) is not None]

    @property
    def _waiting(self) -> Step | None:
        step = self._step
        if step is None or self._without_backward >= _GIVEN_UP:
            return None
        return None if step.over or step.backward.blind or step.abandoned else step

    def opened(self, step: Step, around: Sequence[Step]) -> None:
        """A step of this handle has begun inside of these."""
        self._step = step
        step.nesting.alone = len(self._all) == 1
        for outer in around:
            outer.nesting.contains(step)
        if step.has_plan and around:
            step.nesting.told_of_others = all(map(predicts, around))
            self.share_predictions(step)

    def share_predictions(self, step: Step) -> None:
        """Steps that are open at once peak where the highest of them does."""
        for other in self._of_others():
            if predicts(other):
                other.nesting.others_peak = max(other.nesting.others_peak, step.own_peak)
                step.nesting.others_peak = max(step.nesting.others_peak, other.own_peak)

    def beside_bytes(self, around: Sequence[Step], in_use: int) -> int:
        """What the steps of others may add to a step, while it is open, to what is in use now."""
        if not (around and self._interrupted):
            return 0
        peaks = [step.own_peak for step in around if predicts(step)]
        return max(0, max(peaks, default=0) - in_use)

    def leave(self) -> None:
        """The handle is detached."""
        self._close()
        self._device = None
        self._all.discard(weakref.ref(self))

    def _close(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._interrupted |= step.nesting.interrupted
            self.interrupts |= step.nesting.interrupts
            self._without_backward = 0 if step.over else self._without_backward + 1


def predicts(step: Step) -> bool:
    """Whether it is known how far a step will rise."""
    return step.has_plan and not step.observed
