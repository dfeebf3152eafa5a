"""Memory that depends on what is in a batch: noticed while the step runs, and held."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mimose
import models
from chains import chain, run
from loops import Batch, adamw, texts, tight_budget
from mimose.costs.timeline import levels
from mimose.memory.meters import Meter, Reading
from mimose.planning.plan import Plan
from mimose.training.correction import Watch
from parts import Layer

WIDTH = 16


class Detector(nn.Module):
    """Two stages: the second one's blocks see as many rows as the first one has let through.

    How many that are is drawn anew in each step, as a detector's proposals are.
    """

    def __init__(self, first: int = 2, second: int = 4) -> None:
        super().__init__()
        self.share: float | None = None
        """What is let through, if it is not to be drawn."""
        self.embedding = nn.Embedding(50, WIDTH)
        self.first = nn.ModuleList(Layer(WIDTH) for _ in range(first))
        self.second = nn.ModuleList(Layer(WIDTH) for _ in range(second))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.first:
            x = block(x)
        share = self.share or 0.2 + 0.8 * torch.rand(()).item()
        rows = x.flatten(0, 1)
        x = rows[torch.rand(len(rows)).argsort()[: int(share * len(rows))]][None]
        for block in self.second:
            x = block(x)
        return self.head(x.mean(1))

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.first, *self.second]


def train(
    model: Detector, batches: list[Batch], handle: mimose.Mimose | None = None
) -> tuple[list[float], list[int]]:
    """Losses, and the real peaks of all steps under `handle`."""
    torch.manual_seed(1)
    losses, peaks = [], []

    def step(batch: Batch) -> float:
        loss = models.loss_of(model, batch)
        loss.backward()
        return loss.item()

    with adamw(model) as optimizer:
        for batch in batches:
            losses.append(step(batch) if handle is None else handle.retry(step, batch))
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                peaks.append(handle.stats().last_real_peak_bytes or 0)
    return losses, peaks


STEPS = 40


def budget_for(model: Detector, batch: Batch, share: float = 0.4, rows: float = 1.0) -> int:
    """Tight if so many rows are let through."""
    model.share = rows
    budget = tight_budget(model, [batch] * 3, share)
    model.share = None
    return budget


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_no_step_is_lost_where_later_blocks_see_a_random_number_of_rows(share: float) -> None:
    model, batches = Detector(), texts([40] * STEPS, batch=6)
    budget = budget_for(model, batches[0], share)
    plain = copy.deepcopy(model)
    expected, _ = train(plain, batches)
    with mimose.auto_checkpoint(model, budget, enforce=True, blocks=model.blocks) as handle:
        losses, _ = train(model, batches, handle)
        stats = handle.stats()
    assert losses == expected
    assert stats.peak_bytes <= budget
    assert stats.recoveries <= STEPS // 8
    assert stats.observed_steps <= STEPS // 3
    assert stats.runs_kept > 0


def test_random_rows_stay_within_the_budget_without_a_limit() -> None:
    model, batches = Detector(), texts([40] * STEPS, batch=6)
    budget = budget_for(model, batches[0])
    with mimose.auto_checkpoint(model, budget, blocks=model.blocks) as handle:
        _, peaks = train(model, batches, handle)
        stats = handle.stats()
    over = [peak for peak in peaks[STEPS // 3 :] if peak > budget]
    assert len(over) <= 2
    assert stats.runs_kept > 0


def test_step_that_is_larger_than_its_kind_is_corrected_while_it_runs() -> None:
    model, batches = Detector(), texts([40], batch=6)
    budget = budget_for(model, batches[0], 1.0, rows=0.5)
    with mimose.auto_checkpoint(model, budget, enforce=True, blocks=model.blocks) as handle:
        for model.share in [0.3, 0.5, 0.4, 0.35, 0.45] * 8:
            train(model, batches, handle)
        before = handle.stats()
        assert handle._engine.scheduler.cost_model.doubtful(before.last_size)
        model.share = 0.9
        train(model, batches, handle)
        after = handle.stats()
    assert after.corrections == before.corrections + 1
    assert after.recoveries == before.recoveries
    assert after.peak_bytes <= budget


def test_random_rows_at_random_lengths_are_survived() -> None:
    dice = torch.Generator().manual_seed(3)
    lengths = torch.randint(20, 60, (STEPS,), generator=dice).tolist()
    model, batches = Detector(), texts(lengths, batch=6)
    budget = budget_for(model, texts([60], batch=6)[0])
    plain = copy.deepcopy(model)
    expected, _ = train(plain, batches)
    with mimose.auto_checkpoint(model, budget, enforce=True, blocks=model.blocks) as handle:
        losses, _ = train(model, batches, handle)
        stats = handle.stats()
    assert losses == expected
    assert stats.peak_bytes <= budget
    assert stats.recoveries <= STEPS // 8


class Scripted(Meter):
    """Says what it is told to."""

    device_bytes = 1 << 40

    def __init__(self) -> None:
        self.in_use = 0

    def read(self) -> Reading:
        return Reading(self.in_use, self.in_use, self.in_use, self.in_use)

    def reset_peak(self) -> None: ...

    def free_bytes(self) -> int:
        return self.device_bytes

    def limit(self, number_of_bytes: int | None) -> None: ...


KEEP, AGAIN = False, True
FOUR = chain(
    *(run(start=10 * k, forward=10 * k, entry=10 * k, saved=100, spike=100, input=10, nanoseconds=1)
      for k in range(4))
)  # fmt: skip


def watch(available: int, *choices: bool, at: range = range(4)) -> tuple[Watch, Scripted]:
    plan = Plan.of(FOUR, choices, available)
    meter = Scripted()
    return Watch(meter, 0, FOUR, plan, available, at), meter


def given(size: int) -> Any:
    return (torch.zeros(size, dtype=torch.uint8),)


def test_step_on_its_timeline_is_left_alone() -> None:
    watching, meter = watch(1000, KEEP, KEEP, KEEP, KEEP)
    for position, level in enumerate(levels(FOUR, [KEEP] * 4)):
        meter.in_use = level
        assert watching.before_run(position, given(10), {}) is None
    assert watching.difference == 0


def test_memory_ahead_of_the_timeline_makes_the_rest_recompute() -> None:
    watching, meter = watch(450, KEEP, KEEP, KEEP, KEEP)
    meter.in_use = 0
    assert watching.before_run(0, given(10), {}) is None
    meter.in_use = 250  # 110 were to be in use
    choices = watching.before_run(1, given(10), {})
    assert choices is not None
    assert choices[0] is KEEP  # it has run
    assert sum(choices[1:]) > 0
    assert watching.difference > 0.5


def test_memory_ahead_with_plenty_left_changes_nothing() -> None:
    watching, meter = watch(10_000, KEEP, KEEP, KEEP, KEEP)
    meter.in_use = 250
    assert watching.before_run(1, given(10), {}) is None


def test_larger_arguments_count_before_they_have_cost_anything() -> None:
    watching, meter = watch(450, KEEP, KEEP, KEEP, KEEP)
    meter.in_use = 110
    choices = watching.before_run(1, given(20), {})
    assert choices is not None
    assert sum(choices) > 0


def test_plan_never_becomes_laxer() -> None:
    watching, meter = watch(250, AGAIN, AGAIN, AGAIN, KEEP)
    meter.in_use = 0
    for position in range(4):
        choices = watching.before_run(position, given(1), {})
        assert choices is None


def test_nobody_looks_where_nobody_is_asked_to() -> None:
    watching, meter = watch(450, KEEP, KEEP, KEEP, KEEP, at=range(3, 4))
    meter.in_use = 10_000
    assert watching.before_run(1, given(10), {}) is None
    assert watching.before_run(3, given(10), {}) is not None
