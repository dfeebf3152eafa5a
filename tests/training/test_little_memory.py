"""Budgets that inputs of recomputed blocks alone would fill: they wait on the host from the first
step on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mimose
from loops import Batch, Predictions, lengths, once, peak_of_recomputing, train

WIDTH = 64


class Thin(nn.Module):
    """Its input is as large as all that it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Deep(nn.Module):
    """Many thin blocks."""

    def __init__(self, blocks: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Thin() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).pow(2).mean()


def made() -> tuple[nn.Module, list[Batch]]:
    sizes = [600, 600, 600, *lengths(12, 100, 600, 1)]
    return Deep(), [{"x": torch.randn(size, WIDTH)} for size in sizes]


@once
def peak_of_all_recomputed() -> int:
    return peak_of_recomputing(*made(), loss_of=loss_of)


def task(share: float) -> tuple[nn.Module, list[Batch], int]:
    """A model, batches, and a budget that is this share of what recomputing everything needs.

    Made anew in each test: what others have made is not counted as memory in use.
    """
    budget = int(share * peak_of_all_recomputed())
    return *made(), budget


@pytest.mark.parametrize("share", [0.95, 0.9, 0.85])
def test_inputs_on_the_host_train_where_recomputing_everything_does_not_fit(share: float) -> None:
    model, batches, budget = task(share)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget, enforce=True, host_memory="1GiB") as handle:
        predictions = Predictions(handle)
        losses = train(model, batches, loss_of=loss_of, after_step=predictions)
        stats = handle.stats()
    assert losses == train(plain, batches, loss_of=loss_of)
    assert stats.recoveries == 0
    assert stats.peak_bytes <= budget
    assert predictions.errors


def test_without_the_host_the_first_step_runs_out() -> None:
    model, batches, budget = task(0.6)
    options: Any = {"choices": ("keep", "recompute"), "host_memory": "1GiB"}
    with (
        mimose.auto_checkpoint(model, budget, enforce=True, **options),
        pytest.raises(torch.OutOfMemoryError),
    ):
        train(model, batches[:1], loss_of=loss_of)


def test_the_log_tells_of_a_step_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    model, batches, budget = task(0.6)
    small = {"x": batches[0]["x"][:20].clone()}
    options: Any = {"choices": ("keep", "recompute"), "enforce": True}
    with mimose.auto_checkpoint(model, budget, **options):
        with pytest.raises(torch.OutOfMemoryError):
            train(model, batches[:1], loss_of=loss_of)
        model.zero_grad()
        train(model, [small, small], loss_of=loss_of)
    told = [line for line in caplog.messages if "is lost" in line]
    assert len(told) == 1
    assert "with input 600×64, ran out of memory" in told[0]
    assert "handle.retry(step, batch)" in told[0]


def test_the_error_says_how_much_a_known_size_needs() -> None:
    model, batches, budget = task(0.6)
    options: Any = {"choices": ("keep", "recompute")}
    with mimose.auto_checkpoint(model, "1GiB", **options) as handle:
        train(model, batches[:3], loss_of=loss_of)
        state = handle.state_dict()
    model.zero_grad()
    with mimose.auto_checkpoint(model, budget, enforce=True, **options) as handle:
        handle.load_state_dict(state)
        with (
            pytest.warns(mimose.MimoseWarning, match="raise memory_budget"),
            pytest.raises(mimose.OutOfMemory, match=r"recomputed: it needs 5\.\d+ MiB, the budget"),
        ):
            handle.retry(train, model, batches[:1], loss_of=loss_of)


def test_the_log_tells_once_that_observed_steps_exceed_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batches, budget = task(0.6)
    with mimose.auto_checkpoint(model, budget, choices=("keep", "recompute")):
        train(model, batches[:1], loss_of=loss_of)
        train(model, [{"x": torch.randn(700, WIDTH)}], loss_of=loss_of)
    told = [line for line in caplog.messages if "in an observed step" in line]
    assert len(told) == 1
    assert "enforce=True makes the budget a hard limit" in told[0]


def test_a_moved_input_is_still_known_as_movable() -> None:
    """An observed step whose inputs waited on the host plans the same again."""
    model, batches, budget = task(0.7)
    with mimose.auto_checkpoint(model, budget, enforce=True, host_memory="1GiB") as handle:
        train(model, batches[:1], loss_of=loss_of)
        assert handle.stats().moved_bytes > 0
        profile = handle.explain(**batches[0]).profile
    assert profile is not None
    movable = [run.input_movable for run in profile.runs]
    assert movable[1:-1] == [True] * 22
