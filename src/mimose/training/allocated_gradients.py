"""The gradients that a step allocates."""

from __future__ import annotations

import weakref

from mimose.tensors import Gradients, bytes_of


class AllocatedGradients:
    """Counts gradients as they come into being; and sees whether existing ones are cleared late.

    Some trainers clear gradients between forward and backward: these burden the forward, are gone
    like previous outputs, and are allocated anew in the backward.
    """

    def __init__(self, gradients: Gradients) -> None:
        sample = gradients.missing()
        self.most = gradients.will_be_allocated(sample)
        """Whether most come into being in the step, rather than being added to."""
        self._updated = gradients.parameters_updated
        missing = any(sample)
        # Where plans are told of none to come, levels are measured with those that do come.
        self._missing = [p for p in gradients.parameters if p.grad is None] if missing else []
        existing = ((p, p.grad) for p in gradients.parameters)
        self._existing = [(p, weakref.ref(grad)) for p, grad in existing if grad is not None]
        self.existed = bool(self._existing)
        self.cleared = False
        """Whether some of them were gone when the backward began."""
        self.counts = bool(self._missing)
        """Whether any are to be allocated, so that there is something to count."""
        self._bytes = 0

    def so_far(self) -> int:
        """The bytes allocated by now."""
        still = [p for p in self._missing if p.grad is None]
        if len(still) < len(self._missing):
            self._bytes += bytes_of(p for p in self._missing if p.grad is not None)
            self._missing = still
        return self._bytes

    def backward_begins(self) -> int:
        """The bytes of existing gradients that were cleared since the step began."""
        self.cleared = any(p.grad is None for p, _ in self._existing)
        if not self.cleared:
            return 0
        # Those of the head have come into being again by now.
        cleared = [p for p, grad in self._existing if p.grad is None or p.grad is not grad()]
        # Only where the next such step is foreseen to clear them: it is to find this one.
        self.most |= self._updated
        self._missing += cleared
        self.counts = True
        return bytes_of(cleared)

    def release(self) -> None:
        """Hold on to no parameter any more."""
        self._missing, self._existing = [], []
