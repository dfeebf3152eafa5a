"""Each rank moves what it likes to the host: gradients are those of plain DDP and FSDP2."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from pair import Pair
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from twins import Record, assert_plans_differ, batches_of, in_fp32, train_side_by_side

import models
from mimose.costs import Option, Profile
from mimose.planning import Plan, Planner
from parts import Assembled


class AsDrawn(Planner):
    """Chooses among all options at random."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        choices = [self._draw.choice(list(Option)) for _ in profile.runs]
        return Plan.of(profile, choices, available_bytes)


def sharded(model: Any) -> nn.Module:
    for block in model.encoder.layers:
        fully_shard(block, reshard_after_forward=True)
    return fully_shard(model)


def wrapped(model: nn.Module, how: str) -> nn.Module:
    return sharded(model) if how == "fsdp2" else DistributedDataParallel(model)


def train(rank: int, how: str) -> tuple[Record, int, list[int]]:
    """What was done, the bytes that moved, and those that the host holds in use and at all."""
    ours = models.Encoder(layers=4)
    plain = wrapped(copy.deepcopy(ours), how)
    model = wrapped(ours, how)
    handle = Assembled(ours, "4GiB", planner=AsDrawn(rank), host_bytes=1 << 28)
    batches = batches_of(rank, 12)
    with handle:
        for each in (plain, model):  # settles the device
            torch.manual_seed(0)
            in_fp32(each, batches[0]).backward()
            each.zero_grad()
        assert handle.setting.host.begun() is not None  # by itself it begins where memory is short
        record = train_side_by_side(plain, model, handle, batches, loss_of=in_fp32)
        moved = handle.setting.host.moved_bytes
        memory = handle.setting.host.memory
        assert memory is not None
        return record, moved, [memory.arena.in_use_bytes, memory.arena.held_bytes]


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_ranks_move_what_they_like(pair: Pair, how: str) -> None:
    answers = pair.run(train, how)
    assert_plans_differ([record for record, *_ in answers])
    for record, moved, (in_use, held) in answers:
        assert any(option.moves for plan in record.planned for option in plan)
        assert moved > 0
        assert in_use == 0 < held
