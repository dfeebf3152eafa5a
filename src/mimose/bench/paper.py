"""The Mimose paper's system as it was published, written from its text.

Ten observed steps, in which every layer is checkpointed and its forward runs once more to be
measured ("shuttling"). Then for each layer a polynomial of degree two of the number of elements in
the batch, fitted once. For each size the layers that Algorithm 1 picks are checkpointed, by torch's
own checkpoint. A fixed reserve; a cache of plans by size; nothing is corrected, and nothing is
learned after the tenth step.

Where the paper leaves something open, this is what stands here: its pseudo-code is taken literally;
a plan serves sizes that are up to 2 % smaller than the one it was made for; a layer that runs
several times in a step is one layer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from mimose.bench.arena import Trainee
from mimose.bench.batches import BatchShape
from mimose.bench.contestant import Contestant, StepNote
from mimose.costs import InputSize, Profile, RunCost
from mimose.interception import find_blocks
from mimose.memory import Meter
from mimose.planning import GreedyLiteral
from mimose.tensors import new_bytes

OBSERVED_STEPS = 10
RESERVE_BYTES = 500_000_000
"""The paper reserves 0.5 to 1 GB."""
_USUAL_BUDGET_BYTES = 6_000_000_000
"""The paper's middle budget. A model in miniature has the reserve's share of it."""
_TOLERANCE = 0.02
"""By how much a size may be smaller than the one whose plan it takes, as a share."""


@dataclass(slots=True)
class Layer:
    """What was measured of one layer."""

    elements: list[int] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    _fit: list[float] = field(default_factory=list)

    def note(self, elements: int, saved_bytes: int) -> None:
        self.elements.append(elements)
        self.saved_bytes.append(saved_bytes)

    def fit(self) -> None:
        """The polynomial of degree two; of less, if there were not enough sizes."""
        degree = min(2, len(set(self.elements)) - 1)
        self._fit = np.polyfit(self.elements, self.saved_bytes, degree).tolist()

    def predict(self, elements: int) -> int:
        return max(0, round(float(np.polyval(self._fit, elements))))


class PlanBySize:
    """Algorithm 1 on what the layers are predicted to save, and the cache of its plans."""

    def __init__(self, layers: Sequence[Layer], available_bytes: int) -> None:
        self._layers, self._available_bytes = layers, available_bytes
        self._plans: dict[int, tuple[bool, ...]] = {}
        self.seconds = 0.0
        """Host time of making plans."""

    @property
    def made(self) -> int:
        """How many plans were made."""
        return len(self._plans)

    def plan(self, elements: int) -> tuple[bool, ...]:
        """Which layers are checkpointed."""
        near = (at for at in self._plans if at * (1 - _TOLERANCE) <= elements <= at)
        at = min(near, default=None)
        if at is not None:
            return self._plans[at]
        began = time.perf_counter()
        made = self._plans[elements] = self._new_plan(elements)
        self.seconds += time.perf_counter() - began
        return made

    def _new_plan(self, elements: int) -> tuple[bool, ...]:
        runs = tuple(_saving(layer.predict(elements)) for layer in self._layers)
        profile = Profile(InputSize((), ()), runs, 0, 0)
        plan = GreedyLiteral().plan(profile, self._available_bytes)
        return tuple(option.recomputes for option in plan.choices)


def _saving(saved_bytes: int) -> RunCost:
    """All that Algorithm 1 knows of a layer."""
    return RunCost(0, 0, 0, saved_bytes, 0, 0, 0, 0)


@final
class Paper(Contestant):
    """The paper's system as published, on torch's own checkpoint."""

    name = "paper"

    def attach(self, trainee: Trainee) -> None:
        self._meter: Meter = trainee.meter
        self._steps = self._elements = 0
        self._fit_seconds = self._deciding_seconds = 0.0
        blocks = find_blocks(trainee.model)
        self._layers = [Layer() for _ in blocks]
        self._plans: PlanBySize | None = None
        self._checkpointed: tuple[bool, ...] = (True,) * len(blocks)
        for index, block in enumerate(blocks):
            forward = block.module.forward
            block.module.forward = functools.partial(self._call, index, forward)

    def step_begins(self, shape: BatchShape) -> None:
        self._steps += 1
        self._elements = self.match.arena.task.source.elements(shape)
        began = time.perf_counter()
        if self._steps == OBSERVED_STEPS + 1:
            self._learn()
        learned = time.perf_counter()
        if self._plans is not None:
            self._checkpointed = self._plans.plan(self._elements)
        self._fit_seconds += learned - began
        self._deciding_seconds += time.perf_counter() - learned

    def _learn(self) -> None:
        budget = self.match.budget_bytes
        assert budget is not None
        for layer in self._layers:
            layer.fit()
        small = self.match.arena.conditions.small
        reserve = RESERVE_BYTES * budget // _USUAL_BUDGET_BYTES if small else RESERVE_BYTES
        available = budget - reserve - self._meter.read().in_use
        self._plans = PlanBySize(self._layers, available)

    def _call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._plans is None:
            self._shuttle(self._layers[index], forward, args, kwargs)
        if not self._checkpointed[index]:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def _shuttle(self, layer: Layer, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run the forward once only to see what it keeps; the RNG is put back."""
        with torch.random.fork_rng(self._devices):
            before = self._meter.read().in_use
            out = forward(*args, **kwargs)
            own = new_bytes(out, (args, kwargs))
            layer.note(self._elements, self._meter.read().in_use - before - own)

    @property
    def _devices(self) -> list[torch.device]:
        device = self.match.arena.device
        return [device] if device.type == "cuda" else []

    def step_over(self) -> StepNote:
        return StepNote(recomputed=sum(self._checkpointed), observed=self._plans is None)

    def spent(self) -> dict[str, Any]:
        plans = self._plans
        return {
            "observed_steps": min(self._steps, OBSERVED_STEPS),
            "fits": int(plans is not None),
            "plans": 0 if plans is None else plans.made,
            "fit_seconds": self._fit_seconds,
            "plan_seconds": 0.0 if plans is None else plans.seconds,
            "deciding_seconds": self._deciding_seconds,
        }
