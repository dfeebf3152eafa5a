"""Where a block's forward speaks to other ranks, all ranks recompute the same; nothing hangs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import models
from mimose.errors import ConflictError
from pair import Pair
from test_ddp import in_fp32
from twins import Record, batches_of, throwing_dice, train_side_by_side


class Mean(torch.autograd.Function):
    """The mean over all ranks, there and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "avg", dist.group.WORLD).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce(gradient.contiguous(), "avg", dist.group.WORLD).wait()


class SharedNorm(nn.Module):
    """A norm whose mean is that of all ranks' features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - Mean.apply(x.mean((0, 1)))


def with_shared_norm() -> nn.Module:
    model = models.Encoder()
    for layer in model.encoder.layers:
        layer.norm1 = nn.Sequential(nn.LayerNorm(32), SharedNorm())
    return model


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded_inside_blocks(model: Any) -> nn.Module:
    for block in model.encoder.layers:
        fully_shard(block.self_attn, reshard_after_forward=True)
        fully_shard(block.linear1, reshard_after_forward=True)
        fully_shard(block, reshard_after_forward=True)
    return fully_shard(model)


def tensor_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.encoder.layers:
        parallelize_module(
            block, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        )
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )


SPREAD: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], nn.Module]]] = {
    "shared norm": (with_shared_norm, in_ddp),
    "FSDP2 units inside blocks": (models.Encoder, sharded_inside_blocks),
    "tensor parallel": (models.Encoder, tensor_parallel),
    "FSDP1": (models.Encoder, fsdp1),
}


def train(rank: int, make: Callable[[], nn.Module], spread: Callable[[Any], nn.Module]) -> Any:
    plain = make()
    ours = spread(copy.deepcopy(plain))
    plain = spread(plain)
    with throwing_dice(ours, rank) as handle:
        batches = batches_of(0 if spread is tensor_parallel else rank)
        record = train_side_by_side(plain, ours, handle, batches, loss_of=in_fp32)
        return record, handle._agreement.needed


@pytest.mark.parametrize(("make", "spread"), SPREAD.values(), ids=SPREAD)
def test_ranks_whose_blocks_speak_to_each_other_recompute_the_same(
    pair: Pair, make: Callable[[], nn.Module], spread: Callable[[Any], nn.Module]
) -> None:
    (first, reason), (second, _) = pair.run(train, make, spread)
    assert reason is not None
    print(reason, first)
    assert first.plans == second.plans
    assert len(set(first.planned)) > 1
