"""Operator traces on a GPU: the allocator agrees with their sizes, and views take no time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mimose.comparison import Trace, record_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def traced() -> tuple[Trace, int]:
    """A step of a small network, and by how much it rose by the allocator's account."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)))
    model.cuda()
    batch = torch.randn(64, 128, 1024, device="cuda")

    def step() -> None:
        model.zero_grad()
        model(batch).flatten(1).square().mean().backward()

    trace = record_trace(step, device="cuda")
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return trace, torch.cuda.max_memory_allocated() - before


def test_peak_of_a_trace_is_that_of_the_allocator(traced: tuple[Trace, int]) -> None:
    trace, rise = traced
    assert trace.peak_bytes - trace.constant_bytes == pytest.approx(rise, rel=0.01)


def test_operators_of_the_backward_are_recorded_and_take_time(traced: tuple[Trace, int]) -> None:
    calls = {call.name: call for call in traced[0].calls}
    assert calls["aten.gelu_backward.default"].nanoseconds > 0
    assert calls["aten.addmm.default"].nanoseconds > 0


def test_views_take_no_time(traced: tuple[Trace, int]) -> None:
    views = [
        call
        for call in traced[0].calls
        if call.outputs and all(output.alias_of is not None for output in call.outputs)
    ]
    assert views
    assert {call.nanoseconds for call in views} == {0}
