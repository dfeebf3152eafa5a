"""The session on a CUDA device: exact losses, no synchronisation, the budget as a hard limit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import mimose
import models
from mimose.bench.measuring import LatestStep
from mimose.memory.allocator import PROCESS
from mimose.memory.meters import meter_for
from parts import Assembled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(steps: int, **options) -> tuple[list[float], mimose.Mimose | None]:
    """Losses of a run on batches of varying length, plain or under mimose."""
    torch.manual_seed(0)
    model = models.Encoder(layers=4, width=64).cuda().train()
    handle = mimose.auto_checkpoint(model, **options) if options else None
    losses = losses_of(model, steps)
    if handle is not None:
        handle.detach()
    return losses, handle


def losses_of(model: nn.Module, steps: int) -> list[float]:
    draw, losses = random.Random(0), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 50, (8, draw.randint(16, 200)), device="cuda")
        loss = model(tokens).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("planner", ["optimal", "greedy", "static", "keep_all", "recompute_all"])
def test_losses_of_300_steps_are_those_of_plain_training(planner: str) -> None:
    base = torch.cuda.memory_allocated()
    plain, _ = trained(300)
    ours, handle = trained(300, memory_budget=base + 90 * 2**20, planner=planner)
    assert ours == plain
    assert handle is not None
    assert handle.stats().planned_steps > 280


def test_planned_step_does_not_synchronise() -> None:
    model = models.Encoder(layers=4, width=64).cuda().train()
    handle, latest = mimose.auto_checkpoint(model, "4GiB"), LatestStep()
    handle.subscribe(latest)
    batches = [torch.randint(0, 50, (8, n), device="cuda") for n in (120, 40, 60, 80, 100, 120)]
    for tokens in [*batches, *batches]:
        model(tokens).pow(2).mean().backward()
        torch.cuda.synchronize()
        model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in [torch.zeros(8, 77, dtype=torch.long, device="cuda"), *batches]:
            model(tokens).pow(2).mean().backward()
            step = latest.record
            assert step is not None
            assert not step.observed
            assert not step.is_bound
            assert step.predicted_peak_bytes is not None, "the prediction is not trusted"
            model.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        handle.detach()


def test_enforced_budget_limits_what_the_allocator_holds() -> None:
    torch.cuda.empty_cache()
    budget = torch.cuda.memory_reserved() + 400 * 2**20
    model = nn.Sequential(*(models.Encoder(layers=1, width=64).encoder for _ in range(8))).cuda()
    model.train()
    torch.cuda.reset_peak_memory_stats()
    handle = mimose.auto_checkpoint(model, budget, enforce=True)
    for length in (300, 120, 200, 250, 330, 220, 310, 340):
        model(torch.rand(16, length, 64, device="cuda")).pow(2).mean().backward()
        model.zero_grad()
        assert torch.cuda.memory_reserved() <= budget
    handle.detach()
    assert handle.stats().peak_held_bytes <= budget


def test_planned_steps_leave_the_users_peak_readings_alone() -> None:
    model = models.Encoder(layers=4, width=64).cuda().train()
    handle = mimose.auto_checkpoint(model, "4GiB")
    tokens = torch.zeros(8, 64, dtype=torch.long, device="cuda")
    for _ in range(3):
        model(tokens).pow(2).mean().backward()
        model.zero_grad()
    ballast = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda")
    high = torch.cuda.max_memory_allocated()
    del ballast
    for _ in range(3):
        model(tokens).pow(2).mean().backward()
        model.zero_grad()
    assert torch.cuda.max_memory_allocated() >= high
    handle.detach()
    assert handle.stats().peak_bytes >= high


@pytest.fixture
def _expandable_segments():
    assert PROCESS.hold() is None
    yield
    PROCESS.release()


@pytest.mark.usefixtures("_expandable_segments")
def test_what_is_lost_between_tensors_is_told() -> None:
    meter = meter_for(torch.device("cuda"))
    torch.cuda.empty_cache()
    page = meter.page_bytes
    tensors = [torch.empty(page // 2, dtype=torch.uint8, device="cuda") for _ in range(64)]
    before = meter.lost_bytes()
    assert before is not None
    assert before < 8 * page
    del tensors[1::2]  # every other half of a page
    after = meter.lost_bytes()
    assert after is not None
    assert 28 * page // 2 <= after - before <= 34 * page // 2
    del tensors
    assert meter.lost_bytes() <= before + page


def test_the_reserve_learns_from_what_forwards_lose() -> None:
    model = models.Encoder(layers=4, width=64).cuda().train()
    with Assembled(model, "80%") as handle:
        losses_of(model, 12)
    reserve = handle.setting.reserve
    assert reserve.bytes == pytest.approx(0.08 * handle.budget_bytes)
    reserve.near_limit = lambda _: True
    lost = handle.setting.meter.lost_bytes()
    assert lost is not None
    for _ in range(8):
        handle.setting.history.forward_over(1)
    assert list(reserve._lost) == [lost] * 8
    assert reserve.minimum_bytes <= reserve.bytes < 0.08 * handle.budget_bytes
