"""Under DistributedDataParallel gradients are those of plain DDP, whatever each rank recomputes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pair import Pair
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twins import (
    Record,
    assert_plans_differ,
    batches_of,
    in_bf16,
    in_fp32,
    on_rank,
    train_side_by_side,
)

import mimose
import models
from loops import tight_budget
from mimose.costs.options import Option
from mimose.errors import ConflictError


class WithSpare(models.Encoder):
    """Has a second head, for odd lengths only."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        head = self.spare if input_ids.shape[1] % 2 else self.head
        return head(self.encoder(self.embedding(input_ids)).mean(1))


class Shared(models.Encoder):
    """Runs each of its layers twice."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.encoder(self.embedding(input_ids))).mean(1))


def train(
    rank: int,
    attach_first: bool,
    loss_of: Callable[..., torch.Tensor] = in_fp32,
    make: Callable[[], nn.Module] = models.Encoder,
    options: dict[str, Any] | None = None,
) -> Record:
    model = make()
    plain = DistributedDataParallel(copy.deepcopy(model), **(options or {}))
    if attach_first:
        handle = on_rank(model, rank)
        ours = DistributedDataParallel(model, **(options or {}))
    else:
        ours = DistributedDataParallel(model, **(options or {}))
        handle = on_rank(ours, rank)
    with handle:
        return train_side_by_side(plain, ours, handle, batches_of(rank), loss_of=loss_of)


@pytest.mark.parametrize("attach_first", [True, False])
def test_gradients_are_those_of_plain_ddp_with_plans_that_differ_by_step_and_rank(
    pair: Pair, attach_first: bool
) -> None:
    assert_plans_differ(pair.run(train, attach_first))


def test_gradients_under_autocast_are_those_of_plain_ddp(pair: Pair) -> None:
    assert_plans_differ(pair.run(train, True, in_bf16))


def test_parameters_that_now_one_rank_uses_and_now_another_get_their_gradients(pair: Pair) -> None:
    options = {"find_unused_parameters": True}
    assert_plans_differ(pair.run(train, True, in_fp32, WithSpare, options))


@pytest.mark.parametrize("make", [models.Encoder, Shared])
def test_a_static_graph_stays_static_whatever_is_recomputed(
    pair: Pair, make: Callable[[], nn.Module]
) -> None:
    assert_plans_differ(pair.run(train, True, in_fp32, make, {"static_graph": True}))


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}])
def test_gradients_do_not_depend_on_how_ddp_packs_them(pair: Pair, options: dict[str, Any]) -> None:
    assert_plans_differ(pair.run(train, False, in_fp32, models.Encoder, options))


def accumulate(rank: int) -> Record:
    model = models.Encoder()
    plain = DistributedDataParallel(copy.deepcopy(model))
    ours = DistributedDataParallel(model)

    def accumulating(model: Any, i: int) -> Any:
        return nullcontext() if i % 3 == 2 else model.no_sync()

    with on_rank(ours, rank) as handle:
        return train_side_by_side(
            plain,
            ours,
            handle,
            batches_of(rank, 18),
            loss_of=in_fp32,
            accumulating=accumulating,
            updates_after=lambda i: i % 3 == 2,
        )


def test_gradients_accumulated_without_sync_are_those_of_plain_ddp(pair: Pair) -> None:
    assert_plans_differ(pair.run(accumulate))


def train_within_budget(rank: int) -> tuple[Record, int, int]:
    model, batches = models.Encoder(), batches_of(rank, 18)
    budget = tight_budget(model, batches, share=0.5)
    plain = DistributedDataParallel(copy.deepcopy(model))
    ours = DistributedDataParallel(model)
    spare = sum(p.nbytes for p in model.parameters())
    budget += 4 * spare  # the other twin, its gradients, and DDP's buckets for both
    with mimose.auto_checkpoint(ours, budget) as handle:
        record = train_side_by_side(plain, ours, handle, batches, loss_of=in_fp32)
        return record, handle.stats().peak_bytes, budget


def test_each_rank_plans_for_its_own_lengths_within_its_own_budget(pair: Pair) -> None:
    results = pair.run(train_within_budget)
    for record, peak, budget in results:
        assert peak <= budget
        assert any(Option.RECOMPUTE in plan for plan in record.planned)
        assert len(set(record.planned)) > 1


def test_data_parallel_is_refused_with_the_line_to_type_instead() -> None:
    model = nn.DataParallel(models.Encoder())
    with pytest.raises(ConflictError, match="torchrun --nproc-per-node=N"):
        mimose.auto_checkpoint(model, "1GiB")
