"""Which gradients exist when a step starts, and which are cleared before its backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from mimose.tensors.nested import bytes_of


class Gradients:
    """The gradients of the trained parameters.

    Most loops clear gradients before the forward, or accumulate into them. Some trainers clear
    them between forward and backward, in the first step after an optimizer step. Such gradients
    take memory in the forward and are allocated again in the backward. Observed steps show whether
    a loop does this.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.bytes = bytes_of(self.parameters)
        self._sample = self.parameters[:: max(1, len(self.parameters) // 3)]
        self._versions: list[int] = []
        self._cleared_late = False
        self._reached: set[nn.Parameter] = set()
        """Parameters that had a gradient after a step. No loss reaches the others."""
        self._bytes_after_step = self.bytes

    def missing(self) -> tuple[bool, ...]:
        """For each parameter of a small sample, whether it has no gradient."""
        return tuple([p.grad is None for p in self._sample])

    def missing_bytes(self, missing: tuple[bool, ...]) -> int:
        """The bytes of the gradients that do not exist yet."""
        if all(missing):
            return self.bytes
        if not any(missing):
            return 0
        reached = self._reached
        return bytes_of(
            p for p in self.parameters if p.grad is None and (not reached or p in reached)
        )

    def will_be_allocated(self, missing: tuple[bool, ...]) -> bool:
        """Whether the step allocates most gradients, rather than adding to existing ones."""
        return 2 * sum(missing) > len(missing) or (self._cleared_late and self.parameters_updated)

    def bytes_cleared_late(self, missing: tuple[bool, ...]) -> int:
        """The bytes of gradients that exist now and will be cleared before the backward."""
        if not self._cleared_late or all(missing) or not self.parameters_updated:
            return 0
        if not any(missing):
            return self._bytes_after_step
        return bytes_of(p for p in self.parameters if p.grad is not None)

    def bytes_to_allocate(self, missing: tuple[bool, ...]) -> int:
        """The bytes of the gradients that a step allocates: those that do not exist yet, and those
        that will be cleared before its backward."""
        return self.missing_bytes(missing) + self.bytes_cleared_late(missing)

    def end_step(self, *, existed: bool | None = None, cleared: bool = False) -> None:
        """Record the end of a step.

        `existed` and `cleared` are known for an observed step: whether gradients existed at its
        start, and whether they were cleared between forward and backward.
        """
        if existed is not None or not self._reached:
            self._reached.update(p for p in self.parameters if p.grad is not None)
        if existed and self.parameters_updated:
            self._cleared_late = cleared
            self._bytes_after_step = bytes_of(p for p in self.parameters if p.grad is not None)
        self._versions = [p._version for p in self._sample]

    @property
    def parameters_updated(self) -> bool:
        """Whether the optimizer has changed parameters since the last step."""
        return bool(self._versions) and self._versions != [p._version for p in self._sample]
