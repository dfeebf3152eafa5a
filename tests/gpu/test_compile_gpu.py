"""Compiled blocks under a session on a CUDA device: plans change, compilations do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.compile_fx import compile_fx

from compare import same
from loops import throwing_dice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(self.norm(x)).tanh())


class Counting:
    """Counts what a backend compiles."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        self.compilations = 0

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.compilations += 1
        return self.backend(graph, examples)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(model: nn.Module, steps: int, after_step: Callable[[], None]) -> None:
    for i in range(steps):
        torch.manual_seed(i)
        x = torch.randn(8, (64, 100, 81, 128, 72)[i % 5], 64, device="cuda")
        model.zero_grad()
        model(x).pow(2).sum().backward()
        after_step()


@pytest.mark.parametrize("backend", [aot_eager, compile_fx], ids=["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_plans_change_from_step_to_step_and_compile_nothing_anew(
    backend: Callable[..., Any], dynamic: bool | None
) -> None:
    model = nn.Sequential(*(Part() for _ in range(4))).cuda()
    plain = copy.deepcopy(model)
    counts = []
    for trainee in (plain, model):
        torch._dynamo.reset()
        counting = Counting(backend)
        for part in trainee:
            part.compile(backend=counting, dynamic=dynamic)
        if trainee is plain:
            trained(plain, 20, lambda: None)
        else:
            plans = _train_with_dice(model)
        counts.append(counting.compilations)
    assert len(plans) > 3
    assert counts[1] == counts[0]
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine.grad, its.grad)


def _train_with_dice(model: nn.Module) -> set[str]:
    plans: set[str] = set()
    with throwing_dice(model, "8GiB") as handle:
        trained(model, 20, lambda: plans.add(str(handle.stats().last_plan)))
    return plans
