"""`mimose.checkpoint` where torch's own is used: inside DDP, around FSDP1 units, in its wrapper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pair import Pair
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import mimose
from compare import assert_same_buffers, assert_same_gradients, same

Layer = Callable[[torch.Tensor], torch.Tensor]
Change = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """Three layers; how they are called is the test's affair. Plain unless `checkpointing`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(20, 20) for _ in range(3))
        self.spare = nn.Linear(20, 20)
        self.checkpointing = False
        self.calls = 0

    def run(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return mimose.checkpoint(layer, x) if self.checkpointing else layer(x)


class Once(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.run(self.second, self.first(x)))


class Twice(Net):
    """The same layer under two checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.run(self.second, self.run(self.second, self.first(x))))


class InTurns(Net):
    """Other layers under a checkpoint in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.run(self.second, self.first(x))
        if self.calls % 2:
            x = self.run(self.third, self.run(self.second, x))
        return self.third(x)


class SharedWeight(Net):
    """Two layers with one weight, each under its own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.run(self.second, self.run(self.first, x).relu()))


STATIC = {"static_graph": True}
UNUSED = {"find_unused_parameters": True}


def under_ddp(rank: int, make: Callable[[], Net], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = make()
    if "find_unused_parameters" not in options and "static_graph" not in options:
        del plain.spare  # plain DDP wants every parameter used
    ours = copy.deepcopy(plain)
    ours.checkpointing = True
    wrapped, wrapped_ours = (DistributedDataParallel(m, **options) for m in (plain, ours))
    for i in range(5):
        torch.manual_seed(10 * i + rank)
        x = torch.randn(4, 20)
        for model in (wrapped, wrapped_ours):
            model.zero_grad()
            model(x).pow(2).sum().backward()
        assert_same_gradients(ours, plain)


@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Once, {}),
        (Once, UNUSED),
        (Once, STATIC),
        (Twice, {}),
        (Twice, UNUSED),
        (Twice, STATIC),
        (InTurns, UNUSED),
        (SharedWeight, {}),
        (SharedWeight, STATIC),
    ],
)
def test_checkpoints_inside_ddp_give_the_gradients_of_plain_ddp(
    pair: Pair, make: Callable[[], Net], options: dict[str, Any], bucket_view: bool
) -> None:
    pair.run(under_ddp, make, {**options, "gradient_as_bucket_view": bucket_view})


def fsdp1(module: nn.Module, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


def wrapped(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_fn=mimose.checkpoint)


def _unchanged(module: nn.Module) -> nn.Module:
    return module


class Called(nn.Module):
    """Calls a module under a checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mimose.checkpoint(self.module, x)


def around_fsdp1(rank: int, use_orig_params: bool) -> None:
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))

    def whole(change: Change = _unchanged) -> nn.Module:
        return fsdp1(change(copy.deepcopy(net)), use_orig_params)

    def in_units(change: Change = _unchanged) -> nn.Module:
        layers = copy.deepcopy(net)
        return nn.Sequential(*(fsdp1(change(layer), use_orig_params) for layer in layers))

    pairs = {
        "a wrapper around one unit": (whole(), wrapped(whole())),
        "a wrapper in one unit": (whole(), whole(wrapped)),
        "a wrapper around units": (in_units(), wrapped(in_units())),
        "units around wrappers": (in_units(), in_units(wrapped)),
        "a call": (whole(), Called(whole())),
    }
    x = torch.randn(10, 3)
    for name, (plain, ours) in pairs.items():
        for _ in range(3):
            for model in (plain, ours):
                model(x).pow(2).sum().backward()
            for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
                same(mine.grad, its.grad, name)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_checkpoints_around_and_inside_fsdp1_units_give_plain_results(
    pair: Pair, use_orig_params: bool
) -> None:
    pair.run(around_fsdp1, use_orig_params)


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, *, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(a), self.linear(b)


def test_torchs_wrapper_passes_keywords_on_to_our_checkpoint() -> None:
    plain = KeywordsOnly()
    ours = copy.deepcopy(plain)
    x = torch.ones(4, 10)
    for model in (plain, wrapped(ours)):
        first, second = model(a=x, b=2 * x)
        (first * second).sum().backward()
    assert_same_gradients(ours, plain)


def test_state_of_a_wrapped_module_fits_a_plain_one_and_back() -> None:
    ours, plain = wrapped(nn.Linear(10, 10)), nn.Linear(10, 10)
    assert plain.load_state_dict(ours.state_dict())
    assert ours.load_state_dict(plain.state_dict())
    assert {name for name, _ in ours.named_parameters()} == set(ours.state_dict())


def test_wrapping_blocks_with_batch_norm_leaves_training_as_it_is() -> None:
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)))
    ours = copy.deepcopy(plain)
    apply_activation_checkpointing(
        ours, checkpoint_wrapper_fn=wrapped, check_fn=lambda m: isinstance(m, nn.Sequential)
    )
    for _ in range(4):
        x = torch.randn(5, 6)
        for model in (plain, ours):
            model.zero_grad()
            model(x).pow(2).sum().backward()
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    for mine, its in zip(ours.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_under_a_checkpoint_trains_as_without(
    norm: type[nn.Module], dtype: torch.dtype
) -> None:
    plain = nn.Sequential(nn.Linear(3, 2), norm(2)).to(dtype)
    ours = copy.deepcopy(plain)
    x = torch.rand(2, 2, 3, 3, dtype=dtype, requires_grad=True)
    for model in (plain, wrapped(ours)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).pow(2).sum().backward()
            optimizer.step()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
