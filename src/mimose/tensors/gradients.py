"""Which gradients exist when a step starts, and which will be gone before its backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from mimose.tensors.nested import bytes_of


class Gradients:
    """The gradients of the trained parameters.

    Most loops clear them before the forward, or add to them. Some trainers clear them between
    forward and backward, in the first step after the optimizer's: then they burden the forward and
    are born again in the backward. That habit is learned from observed steps.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.bytes = bytes_of(self.parameters)
        self._sample = self.parameters[:: max(1, len(self.parameters) // 3)]
        self._reached = [False] * len(self._sample)
        """Which of the sample have had a gradient: others, that no loss reaches, tell nothing."""
        self._versions: list[int] = []
        self._cleared_late = False
        self._most_bytes = self.bytes
        """What there is once a step is over: parameters that no loss reaches have no gradient."""

    def missing(self) -> tuple[bool, ...]:
        """Whether they exist, by a sample: enough to tell one kind of step from another."""
        return tuple([p.grad is None for p in self._sample])

    def missing_bytes(self, missing: tuple[bool, ...]) -> int:
        """The bytes of those that do not exist yet, where the sample says so."""
        if all(missing):
            return self.bytes
        return bytes_of(p for p in self.parameters if p.grad is None) if any(missing) else 0

    def to_be_born(self, missing: tuple[bool, ...]) -> bool:
        """Whether most will come into being in the step, rather than being added to."""
        told = [gone for gone, reached in zip(missing, self._reached, strict=True) if reached]
        told = told or list(missing)
        return 2 * sum(told) > len(told) or (self._cleared_late and self.updated)

    def leaving_bytes(self, missing: tuple[bool, ...]) -> int:
        """The bytes of those that exist now and will be cleared before the backward."""
        if not self._cleared_late or all(missing) or not self.updated:
            return 0
        return self.bytes - self.missing_bytes(missing) if any(missing) else self._most_bytes

    def step_over(self, *, existed: bool | None = None, cleared: bool = False) -> None:
        """A step is over; if it was observed, whether gradients existed and were cleared late."""
        if existed and self.updated:
            self._cleared_late = cleared
            self._most_bytes = bytes_of(p for p in self.parameters if p.grad is not None)
        if not all(self._reached):
            now = (p.grad is not None for p in self._sample)
            self._reached = [a or b for a, b in zip(self._reached, now, strict=True)]
        self._versions = [p._version for p in self._sample]

    @property
    def updated(self) -> bool:
        """Whether the optimizer has changed parameters since the last step."""
        return bool(self._versions) and self._versions != [p._version for p in self._sample]
