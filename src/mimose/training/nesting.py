"""How a step lies among those of other handles."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mimose.training.step import Step


class Nesting:
    """What one step has to do with the open steps of other handles."""

    def __init__(self) -> None:
        self.alone = True
        """Whether no other handle is attached."""
        self.interrupted = False
        """Whether the step around this one went on before this one was through."""
        self.interrupts = False
        """Whether this step went on before one inside of it was through."""
        self.told_of_others = True
        """Whether the steps that this one lies inside of have predictions, too."""
        self.others_peak = 0
        """The highest peak that open steps of other handles are predicted to have."""
        self.inner: list[weakref.ref[Step]] = []
        """The steps of other handles that began since this one last ran."""

    def contains(self, step: Step) -> None:
        """The step of another handle begins while this one waits for its backward."""
        self.inner.append(weakref.ref(step))

    def goes_on(self) -> list[Step]:
        """The inner steps that began since this one last ran, and are alive."""
        inner, self.inner = self.inner, []
        return [step for ref in inner if (step := ref()) is not None]
