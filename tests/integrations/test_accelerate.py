"""Accelerate trains under mimose as without, whichever of `prepare` and attaching comes first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import find_executable_batch_size
from rise import budget_for, rise_of

import loops
import mimose
import models


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(attach: str, budget: int = 0) -> tuple[list[float], mimose.Mimose | None]:
    """bf16 autocast, two micro-batches a step, gradients clipped."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model, batches = models.Encoder(4), loops.texts(loops.lengths(14))
    handle = mimose.auto_checkpoint(model, budget) if attach == "before" else None
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    if attach == "after":
        handle = mimose.auto_checkpoint(prepared, budget)
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        with accelerator.accumulate(prepared):
            loss = models.loss_of(prepared, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if handle is not None:
        handle.detach()
    return losses, handle


@loops.once
def plain_losses_and_rise() -> tuple[list[float], int]:
    losses: list[float] = []
    return losses, rise_of(lambda: losses.extend(train("never")[0]))


@pytest.mark.parametrize("attach", ["before", "after"])
def test_training_is_the_same_whichever_comes_first(attach: str) -> None:
    plain, rise = plain_losses_and_rise()
    budget = budget_for(rise, 0.6)
    losses, handle = train(attach, budget)
    assert handle is not None
    stats = handle.stats()
    assert losses == plain
    assert stats.runs_kept
    assert stats.runs_recomputed
    assert stats.peak_bytes <= budget


def test_model_is_saved_and_unwrapped_as_ever() -> None:
    accelerator = Accelerator(cpu=True)
    model = models.Encoder(2)
    names = list(model.state_dict())
    with mimose.auto_checkpoint(model, "1GiB"):
        prepared = accelerator.prepare(model)
        assert accelerator.unwrap_model(prepared) is model
        assert list(accelerator.get_state_dict(prepared)) == names


def hold(handle: mimose.Mimose | None, model: models.Encoder, batch: loops.Batch) -> None:
    def step() -> None:
        models.loss_of(model, batch).backward()
        model.zero_grad()

    handle.retry(step) if handle else step()


@pytest.mark.parametrize("retried", [True, False], ids=["retried", "by the limit alone"])
def test_accelerate_finds_a_batch_size_that_fits_the_limit(retried: bool) -> None:
    torch.manual_seed(0)
    model, tried = models.Encoder(3), []
    budget = budget_for(rise_of(lambda: hold(None, model, loops.texts([60], 16)[0])), 0.5)

    @find_executable_batch_size(starting_batch_size=64)
    def train_with(batch_size: int) -> None:
        tried.append(batch_size)
        with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
            for batch in loops.texts([60, 60], batch_size):
                hold(handle if retried else None, model, batch)

    train_with()
    assert tried[0] == 64
    assert tried[-1] < 64
