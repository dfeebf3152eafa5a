"""Where a block's forward speaks to other ranks, all ranks recompute the same; nothing hangs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pair import Pair
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
from twins import Record, batches_of, in_fp32, on_rank, train_side_by_side, why_ranks_agree

import mimose
import models
from compare import assert_same_gradients
from loops import block_interceptors
from mimose.costs import Option
from mimose.errors import ConflictError
from mimose.training import Agreement


class Mean(torch.autograd.Function):
    """The mean over all ranks, there and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "avg", dist.group.WORLD).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce(gradient.contiguous(), "avg", dist.group.WORLD).wait()


class SharedNorm(nn.Module):
    """Subtracts the mean over all ranks' features, as synchronized norms do."""

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
        for part in (block.self_attn, block.norm2, block.linear1):
            fully_shard(part, reshard_after_forward=True)
        fully_shard(block, reshard_after_forward=True)
    return fully_shard(model)


def tensor_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.encoder.layers:
        parts = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        parallelize_module(block, mesh, parts)
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )


SPREAD: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], nn.Module], str]] = {
    "shared norm": (with_shared_norm, in_ddp, "issues collectives"),
    "FSDP2 units inside blocks": (models.Encoder, sharded_inside_blocks, "issues collectives"),
    "tensor parallel": (models.Encoder, tensor_parallel, "issues collectives"),
    "FSDP1": (models.Encoder, fsdp1, "FSDP1 unit"),
}


def train(
    rank: int, make: Callable[[], nn.Module], spread: Callable[[Any], nn.Module]
) -> tuple[Record, str | None]:
    plain = make()
    ours = spread(copy.deepcopy(plain))
    plain = spread(plain)
    with on_rank(ours, rank) as handle:
        batches = batches_of(0 if spread is tensor_parallel else rank)
        record = train_side_by_side(plain, ours, handle, batches, loss_of=in_fp32)
        return record, why_ranks_agree(ours)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("make", "spread", "reason"), SPREAD.values(), ids=SPREAD)
def test_ranks_whose_blocks_speak_to_each_other_recompute_the_same(
    pair: Pair, make: Callable[[], nn.Module], spread: Callable[[Any], nn.Module], reason: str
) -> None:
    (first, why), (second, _) = pair.run(train, make, spread)
    assert reason in str(why)
    assert first.plans == second.plans
    assert len(set(first.planned)) > 1


def train_two_passes(rank: int) -> tuple[int, int]:
    """A second, larger input on one rank only, between the plan and the backward."""
    plain = with_shared_norm()
    ours = copy.deepcopy(plain)
    long = texts_of(60) if rank == 0 else texts_of(20)
    with mimose.auto_checkpoint(ours, "4GiB") as handle:
        for i, batch in enumerate([*batches_of(0, 8), *batches_of(0, 3)]):
            for model in (plain, ours):
                torch.manual_seed(i)
                loss = models.loss_of(model, batch)
                (loss + models.loss_of(model, long)).backward()
            assert_same_gradients(ours, plain)
        return handle.stats().planned_steps, handle.stats().observed_steps


def texts_of(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(5, 50, (2, length))}


def test_a_second_larger_input_on_one_rank_is_recomputed_on_all(pair: Pair) -> None:
    first, second = pair.run(train_two_passes)
    assert first == second
    assert first[0] > 0


def resume(rank: int) -> tuple[Record, Record]:
    model, records = with_shared_norm(), []
    learned: dict[str, Any] = {}
    for _ in range(2):
        plain, ours = copy.deepcopy(model), copy.deepcopy(model)
        with on_rank(ours, rank) as handle:
            if learned:
                handle.load_state_dict(learned)
            batches = batches_of(rank, 8)
            records.append(train_side_by_side(plain, ours, handle, batches, loss_of=in_fp32))
            learned = handle.state_dict()
    return records[0], records[1]


def test_after_a_restart_ranks_agree_from_the_second_step_on(pair: Pair) -> None:
    (_, first), (_, second) = pair.run(resume)
    assert first.plans == second.plans
    assert first.plans[0] is None
    assert None not in first.plans[1:]


def attach_to_other_blocks(rank: int) -> str:
    model = with_shared_norm()
    blocks = ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"][: 3 - rank]
    with mimose.auto_checkpoint(model, "4GiB", blocks=blocks, planner="recompute_all"):
        interceptors = block_interceptors(model)
        for interceptor in interceptors:
            interceptor.trusted, interceptor.collective_ranks = True, frozenset({0, 1})
        try:
            Agreement(interceptors).agree({(0, 0): Option.RECOMPUTE})
        except ConflictError as error:
            return str(error)
    return "no error"


def test_ranks_with_different_blocks_are_refused_with_the_numbers(pair: Pair) -> None:
    for message in pair.run(attach_to_other_blocks):
        assert "one has 3 blocks and another 2" in message


class Stub:
    """A seat, as far as an agreement looks at it."""

    def __init__(self, trusted: bool | None = True) -> None:
        self.trusted = trusted
        self.collective_ranks = frozenset({0, 1})

    def follow(self, trusted: bool | None) -> None:
        self.trusted = trusted


def exchange(rank: int) -> dict[str, Any]:
    interceptors = [Stub(), Stub(trusted=None if rank else True), Stub(trusted=rank == 0)]
    agreement = Agreement(interceptors)  # type: ignore[arg-type]
    mine = {
        (0, 0): Option.of(rank == 0),
        (0, 20): Option.of(rank == 1),
        (1, 0): Option.KEEP,
        (2, 0): Option.KEEP,
        (2, 1): Option.KEEP if rank else Option.SAVE_ON_HOST,
        (2, 2): Option.SAVE_ON_HOST if rank else Option.RECOMPUTE_FROM_HOST,
    }
    return {
        "both plan": agreement.agree(mine),
        "one knows more": agreement.agree(mine if rank else {**mine, (1, 1): Option.KEEP}),
        "one observes": agreement.agree(mine if rank else None),
        "any": [agreement.any(rank == 1), agreement.any(False)],
        "trusted": [interceptor.trusted for interceptor in interceptors],
    }


def test_what_one_rank_recomputes_observes_or_distrusts_all_do(pair: Pair) -> None:
    first, second = pair.run(exchange)
    assert first["both plan"] == {
        (0, 0): Option.RECOMPUTE,
        (0, 20): Option.RECOMPUTE,
        (1, 0): Option.KEEP,
        (2, 0): Option.KEEP,
        (2, 1): Option.SAVE_ON_HOST,
        (2, 2): Option.RECOMPUTE_FROM_HOST,
    }
    assert second["both plan"] == {
        **first["both plan"],
        (2, 1): Option.KEEP,
        (2, 2): Option.RECOMPUTE,
    }
    assert first["one knows more"][(1, 1)] is Option.RECOMPUTE
    assert first["one observes"] is second["one observes"] is None
    assert first["any"] == second["any"] == [True, False]
    assert first["trusted"] == second["trusted"] == [True, None, False]


def hook_on_one_rank(rank: int) -> None:
    plain = with_shared_norm()
    ours = copy.deepcopy(plain)
    with mimose.auto_checkpoint(ours, "4GiB", planner="recompute_all"):
        for i, batch in enumerate(batches_of(rank, 6)):
            if i == 3 and rank == 0:
                ours.encoder.layers[1].linear1.register_forward_hook(lambda *_: None)
            for model in (plain, ours):
                torch.manual_seed(i)
                models.loss_of(model, batch).backward()
            assert_same_gradients(ours, plain)


def test_a_hook_that_one_rank_adds_does_not_make_it_wait_for_the_others(pair: Pair) -> None:
    pair.run(hook_on_one_rank)


def exchange_under_another_default_device(rank: int) -> bool:
    torch.set_default_device("meta")
    try:
        return Agreement([Stub()]).any(rank == 1)  # type: ignore[list-item]
    finally:
        torch.set_default_device(None)


def test_ranks_agree_on_the_cpu_whatever_the_default_device_is(pair: Pair) -> None:
    assert pair.run(exchange_under_another_default_device) == [True, True]


def test_a_process_alone_agrees_with_nobody() -> None:
    model, batch = models.encoder()
    with mimose.auto_checkpoint(model, "1GiB"):
        models.loss_of(model, batch).backward()
        assert len(block_interceptors(model)) == 3
        assert why_ranks_agree(model) is None
