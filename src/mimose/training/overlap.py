"""Steps of several handles that are open at the same time, as in a GAN.

The discriminator's step lies inside the generator's step: it begins after the generator's forward
and ends before the generator's backward. Memory that one step keeps is in use during the other. So
that each handle can plan on its own:

- A step inside an observed step keeps nothing. The outer step then measures the least memory of the
  inner one, and its plan leaves room for that. The inner step keeps what fits into the rest.
- The outer step's backward does not count for the inner step; the outer plan accounts for it.
- Both steps are expected to reach the higher of their predicted peaks.
- If the outer step continues before the inner step's backward is over (two losses, one backward
  after the other), the memory kept by the inner step is added to everything the outer step does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch

from mimose.training.step import Step

_STEPS_WITHOUT_BACKWARD = 16
"""After this many consecutive steps without a backward, other handles no longer count this handle's
open step as waiting."""


class Overlap:
    """Relates one handle's open step to the open steps of other handles."""

    _all: ClassVar[set[weakref.ref[Overlap]]] = set()
    """The instances of all handles that train. Not a WeakSet, because its `len` is slow."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._device: torch.device | None = None
        self._without_backward = 0
        self._interrupted = False
        """Whether an outer step has continued during a step of this handle, and so may again."""
        self.interrupts = False
        """Whether a step of this handle has continued during an inner step of another handle."""

    def around(self, device: torch.device) -> list[Step]:
        """A step of this handle begins: the steps of other handles that wait for their backward."""
        self._close()
        if self._device is None:
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
        if step is None or self._without_backward >= _STEPS_WITHOUT_BACKWARD:
            return None
        return None if step.over or step.backward.blind or step.abandoned else step

    def opened(self, step: Step, around: Sequence[Step]) -> None:
        """A step of this handle has begun inside these outer steps."""
        self._step = step
        step.nesting.alone = len(self._all) == 1
        for outer in around:
            outer.nesting.contains(step)
        if step.has_plan and around:
            step.nesting.told_of_others = all(map(predicts, around))
            self.share_predictions(step)

    def share_predictions(self, step: Step) -> None:
        """Steps that are open at the same time share the highest of their predicted peaks."""
        for other in self._of_others():
            if predicts(other):
                other.nesting.others_peak = max(other.nesting.others_peak, step.own_peak)
                step.nesting.others_peak = max(step.nesting.others_peak, other.own_peak)

    def beside_bytes(self, around: Sequence[Step], in_use: int) -> int:
        """Bytes that steps of other handles may add to the memory in use while a step is open."""
        if not (around and self._interrupted):
            return 0
        peaks = [step.own_peak for step in around if predicts(step)]
        return max(0, max(peaks, default=0) - in_use)

    def leave(self) -> None:
        """Stop relating steps, as the handle is detached."""
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
    """Whether the peak of a step is predicted."""
    return step.has_plan and not step.observed
