"""A plain model and its twin under mimose, trained side by side on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import models
from compare import assert_same_gradients
from loops import block_interceptors, texts, throwing_dice
from mimose.bench.measuring import LatestStep
from mimose.costs import Option
from mimose.training import Agreement
from parts import Assembled

Batch = dict[str, Any]
Choices = tuple[Option, ...]


@dataclass
class Record:
    """What one rank did: the plan of each step, None where it was observed."""

    plans: list[Choices | None] = field(default_factory=list)

    @property
    def planned(self) -> list[Choices]:
        return [plan for plan in self.plans if plan is not None]


def batches_of(rank: int, count: int = 14) -> list[Batch]:
    """Batches whose lengths are this rank's own, and come again: what was seen can be planned."""
    torch.manual_seed(100 + rank)
    return texts([(20, 33, 50)[i % 3] + 7 * rank for i in range(count)], batch=2)


def in_fp32(model: nn.Module, batch: Batch) -> torch.Tensor:
    return models.loss_of(model, batch)


def in_bf16(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return models.loss_of(model, batch)


def assert_plans_differ(records: list[Record]) -> None:
    first, second = records
    assert len(first.planned) >= 5
    assert len(set(first.planned)) > 1, "plans do not differ from step to step"
    assert first.plans != second.plans, "plans do not differ from rank to rank"


def on_rank(model: nn.Module, rank: int) -> Assembled:
    """mimose with a planner that decides by chance, differently on each rank."""
    return throwing_dice(model, "4GiB", seed=rank)


def why_ranks_agree(model: nn.Module) -> str | None:
    """Why ranks must recompute the same blocks; None if each may decide for itself."""
    return Agreement(block_interceptors(model)).needed


def train_side_by_side(
    plain: nn.Module,
    ours: nn.Module,
    handle: Assembled,
    batches: Sequence[Batch],
    *,
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
    accumulating: Callable[[nn.Module, int], AbstractContextManager[Any]] = lambda m, i: (
        nullcontext()
    ),
    updates_after: Callable[[int], bool] = lambda i: True,
) -> Record:
    """Train both on the same batches and the same dice; gradients are compared at each step."""
    record, latest = Record(), LatestStep()
    handle.subscribe(latest)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.005) for m in (plain, ours)]
    for i, batch in enumerate(batches):
        for model in (plain, ours):
            torch.manual_seed(i)
            with accumulating(model, i):
                loss_of(model, batch).backward()
        if updates_after(i):
            assert_same_gradients(ours, plain)
        record.plans.append(plan_of(latest))
        if updates_after(i):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return record


def plan_of(latest: LatestStep) -> Choices | None:
    step = latest.record
    assert step is not None
    return None if step.observed or step.plan is None else step.plan.choices
