"""Phases of a step: the first forwards, then one phase for each backward."""

from __future__ import annotations

from dataclasses import dataclass

from mimose.comparison.schedules import (
    Backward,
    Drop,
    Forward,
    Item,
    Operation,
    Recompute,
    Schedule,
)


@dataclass(frozen=True, slots=True)
class Phases:
    """What is recomputed in the phase of each run, and where its activations come from."""

    starts: tuple[int | None, ...]
    """The run at which the recompute in the phase of run j starts; it goes up to run j. None if
    nothing is recomputed in the phase."""
    sources: tuple[int, ...]
    """The phase in which the activations that the backward of run k uses were saved. The number of
    runs stands for the first forwards."""
    fixed: tuple[bool, ...]

    def schedule(self) -> Schedule:
        """The operations; everything is dropped as soon as nothing needs it."""
        count, operations = len(self.starts), []
        for k in range(count):
            keep = self.sources[k] == count
            operations += [Forward(k, keep), *self._drop(count, k, keep)]
        for j in reversed(range(count)):
            operations += [*self._recompute(j), Backward(j)]
        return tuple(operations)

    def _recompute(self, j: int) -> list[Operation]:
        operations: list[Operation] = []
        start = self.starts[j]
        for k in range(j + 1 if start is None else start, j + 1):
            operations.append(Recompute(k, keep=self.sources[k] == j))
            if k < j:
                operations += self._drop(j, k, kept=self.sources[k] >= j)
        return operations

    def _drop(self, phase: int, k: int, kept: bool) -> list[Operation]:
        behind_fixed = k > 0 and self.fixed[k - 1] and not kept
        if self.fixed[k] or behind_fixed or self._used_later(phase, k):
            return []
        return [Drop(Item.INPUT, k)]

    def _used_later(self, phase: int, k: int) -> bool:
        """Whether a later phase starts from the input of k before that is made again."""
        for j in range(phase - 1, k - 1, -1):
            start = self.starts[j]
            if start is not None and start <= k:
                return start == k
        return False
