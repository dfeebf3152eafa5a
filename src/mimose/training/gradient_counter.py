"""Count the gradients that an observed step allocates."""

from __future__ import annotations

import weakref

from mimose.tensors import Gradients, bytes_of


class GradientCounter:
    """Counts gradients as they are allocated, and detects whether existing ones are cleared late.

    Some trainers clear gradients between forward and backward. Such gradients take memory in the
    forward and are allocated again in the backward.
    """

    def __init__(self, gradients: Gradients) -> None:
        sample = gradients.missing()
        self.most = gradients.will_be_allocated(sample)
        """Whether the step allocates most gradients, rather than adding to existing ones."""
        self._updated = gradients.parameters_updated
        missing = any(sample)
        # If no sampled gradient is missing, plans expect none to be allocated, so levels include
        # any that are.
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
        # Those of the head have been allocated again by now.
        cleared = [p for p, grad in self._existing if p.grad is None or p.grad is not grad()]
        # Only after an optimizer update: the next such step is expected to clear its gradients
        # late, too, and must find this observation.
        self.most |= self._updated
        self._missing += cleared
        self.counts = True
        return bytes_of(cleared)

    def release(self) -> None:
        """Hold on to no parameter any more."""
        self._missing, self._existing = [], []
