"""The benchmark's workloads, for scripts that train batches of a single length each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from mimose.bench import workloads
from mimose.bench.batches import Batch, BatchShape
from mimose.bench.texts import Texts


@dataclass(frozen=True)
class Task:
    """A model, a batch size and where its lengths come from."""

    name: str
    work: workloads.Task
    small: bool = False

    @functools.cached_property
    def rows(self) -> int:
        return self._shapes(steps=1, seed=0)[0].rows

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.work.precision == "bf16" else torch.float32

    def make(self) -> nn.Module:
        return self.work.make(self.small, self.work.attention)

    def padded_lengths(self, steps: int, seed: int = 0) -> list[int]:
        """The padded length of each batch: the longest of a random draw."""
        return [shape.lengths[0] for shape in self._shapes(steps, seed)]

    def batch(self, length: int, device: str) -> Batch:
        shape = BatchShape(self.rows, (length,))
        return self.work.batch(shape, number=length, device=torch.device(device))

    def _shapes(self, steps: int, seed: int) -> list[BatchShape]:
        shapes = self.work.shapes(steps + 1, scale=1, small=self.small, seed=seed)
        return shapes[:-1]  # the last one is not full


TASKS = {
    name: Task(name, work)
    for name, work in workloads.TASKS.items()
    if isinstance(work.source, Texts) and len(work.source.files) == 1
}
TASKS["tiny"] = Task("tiny", workloads.TASKS["QA-Bert"], small=True)
