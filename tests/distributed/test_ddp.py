"""Under DistributedDataParallel gradients are those of plain DDP, whatever each rank recomputes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import models
from pair import Pair
from twins import Record, batches_of, throwing_dice, train_side_by_side


class WithSpare(models.Encoder):
    """Has a head that now one rank uses and now another."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        head = self.spare if input_ids.shape[1] % 2 else self.head
        return head(self.encoder(self.embedding(input_ids)).mean(1))


def in_fp32(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return models.loss_of(model, batch)


def in_bf16(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return models.loss_of(model, batch)


def assert_plans_differ(records: list[Record]) -> None:
    first, second = records
    assert len(first.planned) >= 5
    assert len(set(first.planned)) > 1, "plans do not differ from step to step"
    assert first.plans != second.plans, "plans do not differ from rank to rank"


def train(
    rank: int,
    attach_first: bool,
    loss_of: Callable[..., torch.Tensor] = in_fp32,
    make: Callable[[], nn.Module] = models.Encoder,
    options: dict[str, Any] | None = None,
) -> Record:
    plain = make()
    ours = copy.deepcopy(plain)
    wrapped = DistributedDataParallel(plain, **(options or {}))
    if attach_first:
        handle = throwing_dice(ours, rank)
        wrapped_ours = DistributedDataParallel(ours, **(options or {}))
    else:
        wrapped_ours = DistributedDataParallel(ours, **(options or {}))
        handle = throwing_dice(wrapped_ours, rank)
    with handle:
        return train_side_by_side(
            wrapped, wrapped_ours, handle, batches_of(rank), loss_of=loss_of
        )


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("loss_of", [in_fp32, in_bf16])
def test_gradients_are_those_of_plain_ddp_with_plans_that_differ_by_step_and_rank(
    pair: Pair, attach_first: bool, loss_of: Callable[..., torch.Tensor]
) -> None:
    assert_plans_differ(pair.run(train, attach_first, loss_of))


def test_parameters_that_now_one_rank_uses_and_now_another_get_their_gradients(pair: Pair) -> None:
    options = {"find_unused_parameters": True}
    assert_plans_differ(pair.run(train, True, in_fp32, WithSpare, options))


@pytest.mark.parametrize(
    "options",
    [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}],
    ids=str,
)
def test_options(pair: Pair, options: dict[str, Any]) -> None:
    assert_plans_differ(pair.run(train, True, in_fp32, models.Encoder, options))


def accumulate(rank: int) -> Record:
    plain = models.Encoder()
    ours = copy.deepcopy(plain)
    handle = throwing_dice(ours, rank)
    wrapped, wrapped_ours = DistributedDataParallel(plain), DistributedDataParallel(ours)

    def accumulating(model: Any, i: int) -> Any:
        return nullcontext() if i % 3 == 2 else model.no_sync()

    with handle:
        return train_side_by_side(
            wrapped,
            wrapped_ours,
            handle,
            batches_of(rank, 18),
            loss_of=in_fp32,
            accumulating=accumulating,
            updates_after=lambda i: i % 3 == 2,
        )


def test_gradients_accumulated_without_sync_are_those_of_plain_ddp(pair: Pair) -> None:
    assert_plans_differ(pair.run(accumulate))
