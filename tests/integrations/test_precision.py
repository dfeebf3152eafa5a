"""Reduced precision, loss scaling, fused and 8-bit optimizers: as without mimose, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rise import budget_for, rise_of
from torch import nn

import loops
import mimose
import models

Parameters = Any
Optimizer = Callable[[Parameters], torch.optim.Optimizer]


def _8_bit(parameters: Parameters) -> torch.optim.Optimizer:
    optimizers = pytest.importorskip("bitsandbytes").optim
    made: torch.optim.Optimizer = optimizers.AdamW8bit(parameters, 1e-3, min_8bit_size=256)
    return made


def _fused(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, fused=True)


@dataclass(frozen=True)
class Way:
    """One way to train."""

    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    optimizer: Optimizer = torch.optim.AdamW

    def train(self, model: nn.Module, batches: list[loops.Batch]) -> list[float]:
        torch.manual_seed(1)
        optimizer = self.optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=self.scaled)
        losses = []
        for batch in batches:
            context = torch.autocast("cpu", self.autocast) if self.autocast else nullcontext()
            with context:
                loss = models.loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


WAYS = {
    "autocast to bf16": Way(autocast=torch.bfloat16),
    "autocast to fp16, loss scaled": Way(autocast=torch.float16, scaled=True),
    "bf16 model": Way(dtype=torch.bfloat16),
    "fused optimizer": Way(optimizer=_fused),
    "8-bit optimizer": Way(optimizer=_8_bit),
}


@pytest.mark.parametrize("name", WAYS)
def test_training_is_the_same_bit_for_bit_and_within_the_budget(name: str) -> None:
    way = WAYS[name]
    model = models.Encoder(4).to(way.dtype)
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    batches = loops.texts(loops.lengths(14))
    expected: list[float] = []
    rise = rise_of(lambda: expected.extend(way.train(plain, batches)))
    budget = budget_for(rise, 0.6)
    with mimose.auto_checkpoint(ours, budget) as handle:
        assert way.train(ours, batches) == expected
        stats = handle.stats()
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )
    assert stats.runs_kept
    assert stats.runs_recomputed
    assert stats.peak_bytes <= budget
