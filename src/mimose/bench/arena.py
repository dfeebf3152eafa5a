"""Where contestants meet: one task under given conditions, its model built anew for each run.

Every model starts from the same weights (same seed, same device), every step from the same batch
and the same RNG state, so losses can be compared step by step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from mimose.bench.batches import Batch, BatchShape
from mimose.bench.extras import BenchError
from mimose.bench.workloads import Task
from mimose.costs import InputSize
from mimose.memory import Clock, meter_for
from mimose.tensors import SizeFunction, argument_names, custom_input_size, input_size

PRECISIONS = ("fp32", "bf16", "amp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What decides how a run goes, apart from the task and the contestant."""

    device: str
    steps: int
    scale: int = 1
    precision: str | None = None
    """`fp32` (TF32 where the device has it), `bf16` weights, or `amp` for bf16 autocast; None for
    the task's own."""
    attention: str | None = None
    small: bool = False
    seed: int = 0
    leg: int = 0
    """Steps after which the next contestant takes over; 0 for whole runs, one by one."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


class Arena:
    """One task under given conditions."""

    def __init__(self, task: Task, conditions: Conditions) -> None:
        self.task, self.conditions = task, conditions
        self.device = torch.device(conditions.device)
        self.precision = conditions.precision or task.precision
        self.attention = attention_of(task, conditions.attention)
        self.clock = Clock(self.device)
        self.shapes = task.shapes(
            conditions.steps,
            scale=conditions.scale,
            small=conditions.small,
            seed=conditions.seed,
        )

    @property
    def largest(self) -> BatchShape:
        """A batch that needs as much memory as any batch of the run."""
        return self.task.source.largest(self.shapes)

    @property
    def longest(self) -> BatchShape:
        """The largest batch that the data could give: what a static tool has to plan for."""
        conditions = self.conditions
        return self.task.longest_of_data(scale=conditions.scale, small=conditions.small)

    @property
    def device_bytes(self) -> int:
        """What the device has in all."""
        meter = meter_for(self.device)
        meter.close()
        return meter.device_bytes

    @cached_property
    def input_size(self) -> SizeFunction | None:
        """What to pass as `input_size=` for this task's model."""
        function = self.task.input_size
        return None if function is None else function(self.conditions.small)

    def size_of(self, shape: BatchShape) -> InputSize:
        """The size as mimose sees it."""
        batch = self.task.batch(shape, 0, torch.device("meta"))
        if self.input_size is not None:
            return custom_input_size(self.input_size, (), batch)
        return input_size((), batch, self._argument_names)

    @cached_property
    def _argument_names(self) -> tuple[str, ...]:
        with torch.device("meta"):  # its weights are not needed
            model = self.task.make(self.conditions.small, self.attention)
        return argument_names(model.forward)

    @contextlib.contextmanager
    def trainee(self) -> Iterator[Trainee]:
        """A fresh model with its optimizer, in an emptied device; gone at the end."""
        gc.collect()  # what the one before left in cycles
        empty_cache(self.device)
        trainee = Trainee(self)
        try:
            yield trainee
        finally:
            trainee.close()
            del trainee
            gc.collect()
            empty_cache(self.device)


class Trainee:
    """A model in training: the loop that knows nothing of checkpointing."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        # Entered before the model is there: on a CPU it counts every storage born from now on, and
        # slows everybody down alike.
        self.meter = meter_for(arena.device)
        torch.manual_seed(arena.conditions.seed)
        with arena.device:
            model = arena.task.make(arena.conditions.small, arena.attention)
        dtype = torch.bfloat16 if arena.precision == "bf16" else torch.float32
        self.model: nn.Module = model.to(arena.device, dtype).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-5, fused=arena.device.type == "cuda" or None
        )

    def batch(self, shape: BatchShape, number: int) -> Batch:
        """The batch of this number; the RNG is set so that dropout is the same for everybody."""
        torch.manual_seed(number)
        return self.arena.task.batch(shape, number, self.arena.device)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss."""
        amp = self.arena.precision == "amp"
        with torch.autocast(self.arena.device.type, torch.bfloat16, enabled=amp):
            return self.arena.task.loss(self.model(**batch))

    def step(self, shape: BatchShape, number: int) -> torch.Tensor:
        """One training step; the loss, still on the device."""
        loss = self.forward(self.batch(shape, number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def warm_up(self, shape: BatchShape) -> None:
        """One forward and backward that teach nobody anything: libraries load, caches fill."""
        self.forward(self.batch(shape, 0)).backward()
        self.optimizer.zero_grad()
        empty_cache(self.arena.device)

    def recover(self) -> None:
        """A step ran out of memory: nothing of it is left.

        If that was in the optimizer's first step, some parameters have only a part of their state.
        """
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            if "exp_avg_sq" not in state:
                state.clear()
        gc.collect()

    def close(self) -> None:
        self.meter.limit(None)
        self.meter.close()
        del self.model, self.optimizer


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give back what the allocator holds for nobody; peaks start anew."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def attention_of(task: Task, asked: str | None) -> str:
    """The attention that a task runs with; an error if its model has none of this name."""
    if asked not in (None, *task.attentions):
        raise BenchError(
            f"--attention {asked}: {task.name} has only {' and '.join(task.attentions)}"
        )
    return asked or task.attention
