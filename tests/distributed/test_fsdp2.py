"""Under FSDP2 gradients are those of plain FSDP2, whatever each rank recomputes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import models
from pair import Pair
from test_ddp import assert_plans_differ, in_fp32
from twins import Record, batches_of, throwing_dice, train_side_by_side


def sharded(model: models.Encoder, **options: Any) -> nn.Module:
    for block in model.encoder.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(rank: int, attach_first: bool, options: dict[str, Any]) -> Record:
    plain = models.Encoder()
    ours = copy.deepcopy(plain)
    sharded(plain, **options)
    if attach_first:
        handle = throwing_dice(ours, rank)
        sharded(ours, **options)
    else:
        sharded(ours, **options)
        handle = throwing_dice(ours, rank)
    with handle:
        return train_side_by_side(plain, ours, handle, batches_of(rank), loss_of=in_fp32)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard": {"reshard_after_forward": True},
    "keep gathered": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "bf16, reduced in fp32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_plain_fsdp2_with_plans_that_differ_by_step_and_rank(
    pair: Pair, attach_first: bool, options: dict[str, Any]
) -> None:
    assert_plans_differ(pair.run(train, attach_first, options))
