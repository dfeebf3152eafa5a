"""DeepSpeed's ZeRO trains the same with mimose as without, at every stage.

Run where DeepSpeed is installed. It builds its communication for the CPU on first use, which takes
a minute or two: `DS_ACCELERATOR=cpu python -c "import deepspeed; deepspeed.init_distributed()"`
under torchrun does so in advance.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from pair import Pair
from torch import nn
from twins import (
    Record,
    assert_plans_differ,
    batches_of,
    on_rank,
    plan_of,
    why_ranks_agree,
)

import models
from compare import same
from mimose.bench.measuring import LatestStep

pytest.importorskip("deepspeed")


def engine(model: nn.Module, stage: int) -> Any:
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def train(rank: int, stage: int) -> tuple[Record, str | None]:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    plain, record = models.Encoder(), Record()
    ours = copy.deepcopy(plain)
    with on_rank(ours, rank) as handle:
        latest = LatestStep()
        handle.subscribe(latest)
        engines = engine(plain, stage), engine(ours, stage)
        for i, batch in enumerate(batches_of(rank)):
            for trained in engines:
                torch.manual_seed(i)
                trained.backward(models.loss_of(trained, batch))
                trained.step()
            for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
                same(_held(mine), _held(its))
            record.plans.append(plan_of(latest))
        return record, why_ranks_agree(ours)


def _held(parameter: Any) -> torch.Tensor:
    """What this rank holds: under ZeRO-3 its part."""
    return getattr(parameter, "ds_tensor", parameter).data


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_keep_parameters_whole_let_each_rank_plan(pair: Pair, stage: int) -> None:
    (first, why), (second, _) = pair.run(train, stage)
    assert why is None
    assert_plans_differ([first, second])


def test_ranks_agree_where_parameters_are_gathered_in_each_forward(pair: Pair) -> None:
    (first, why), (second, _) = pair.run(train, 3)
    assert "ZeRO-3" in str(why)
    assert first.plans == second.plans
    assert len(set(first.planned)) > 1
