"""The relation of a step to the open steps of other handles."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mimose.training.step import Step


class Nesting:
    """How one step is nested in the open steps of other handles, and they in it."""

    alone = True
    """Whether no other handle is attached."""
    interrupted = False
    """Whether the outer step continued before this step was over."""
    interrupts = False
    """Whether this step continued before an inner step was over."""
    told_of_others = True
    """Whether all outer steps have predictions."""
    others_peak = 0
    """The highest predicted peak of the open steps of other handles."""
    inner: tuple[weakref.ref[Step], ...] = ()
    """The steps of other handles that began since this step last ran."""

    def contains(self, step: Step) -> None:
        """The step of another handle begins while this one waits for its backward."""
        self.inner = (*self.inner, weakref.ref(step))

    def goes_on(self) -> list[Step]:
        """Clear `inner`, as this step runs again; returns the inner steps that are alive."""
        inner, self.inner = self.inner, ()
        return [step for ref in inner if (step := ref()) is not None]
