"""One of several ranks tries a failed step again only while the others cannot tell."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pair import Pair
from torch.nn.parallel import DistributedDataParallel
from twins import batches_of

import mimose
import models
from compare import assert_same_gradients
from mimose.errors import OutOfMemory
from mimose.execution.collectives import CollectivesIssued
from mimose.training.ranks import why_not_alone


class Fuse:
    """A hook that runs out of memory once."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise torch.OutOfMemoryError("the fuse is blown")


def fails_in_forward(rank: int) -> int:
    plain = models.Encoder()
    ours, fuse = copy.deepcopy(plain), Fuse()
    ours.encoder.layers[1].register_forward_pre_hook(fuse)
    wrapped, wrapped_ours = DistributedDataParallel(plain), DistributedDataParallel(ours)
    with mimose.auto_checkpoint(ours, "4GiB") as handle:
        for i, batch in enumerate(batches_of(rank, 6)):
            fuse.armed = rank == i % 2 and i > 2
            for model in (wrapped, wrapped_ours):
                torch.manual_seed(i)
                handle.retry(lambda m=model, b=batch: models.loss_of(m, b).backward())
            assert_same_gradients(ours, plain)
        return handle.stats().recoveries


def test_a_rank_that_fails_in_its_forward_tries_again_while_the_others_wait(pair: Pair) -> None:
    assert pair.run(fails_in_forward) == [1, 2]


def fails_in_backward(rank: int) -> str:
    model, fuse = models.Encoder(), Fuse()
    model.encoder.layers[1].linear1.register_full_backward_hook(fuse)
    wrapped = DistributedDataParallel(model)
    batch = batches_of(rank, 1)[0]
    with mimose.auto_checkpoint(model, "4GiB") as handle:
        fuse.armed = True  # on both, so that none waits for the other
        try:
            handle.retry(lambda: models.loss_of(wrapped, batch).backward())
        except OutOfMemory as error:
            return str(error)
    return "no error"


def test_a_rank_that_fails_in_its_backward_says_why_it_does_not_try_again(pair: Pair) -> None:
    for message in pair.run(fails_in_backward):
        assert "the fuse is blown" in message
        assert "cannot retry a step on its own" in message


def speaks(rank: int) -> list[str | None]:
    collectives = CollectivesIssued()
    before = why_not_alone(collectives, in_forward=True)
    torch.distributed.all_reduce(torch.ones(1))
    return [
        before,
        why_not_alone(collectives, in_forward=True),
        why_not_alone(CollectivesIssued(), in_forward=True),
    ]


def test_a_rank_that_has_issued_a_collective_is_bound_to_the_others(pair: Pair) -> None:
    for rank, (before, after, anew) in enumerate(pair.run(speaks)):
        assert before is None
        assert after is not None
        assert f"ranks [{1 - rank}]" in after
        assert anew is None


def test_a_process_alone_may_always_try_again() -> None:
    assert why_not_alone(CollectivesIssued(), in_forward=False) is None
