"""Several processes train one model: where they must decide alike, and where one may act alone.

As a rule each rank plans for its own batch. A recomputed block only repeats arithmetic, and DDP and
FSDP2 issue the same collectives in the same order whatever is recomputed. It is different where a
block's forward issues collectives itself: synchronized norms, tensor- or expert-parallel layers,
FSDP units inside the block. Its recompute issues them again, and a rank that recomputes would wait
for one that keeps. There the ranks agree first: a block is recomputed everywhere if one rank needs
it, and a step is observed everywhere if one rank must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mimose.costs import Option, Run
from mimose.errors import ConflictError
from mimose.execution import CollectivesIssued, is_distributed

if TYPE_CHECKING:
    from mimose.interception import BlockInterceptor


class Agreement:
    """Makes ranks recompute the same blocks, where a recompute speaks to other ranks.

    One small all-reduce a step among those ranks, on the CPU, in a gloo group of its own: no GPU
    waits for it. A block is recomputed on all of them if the plan of one says so; a step is
    observed on all if one must observe; a block that one cannot recompute none recomputes.
    """

    def __init__(self, interceptors: Sequence[BlockInterceptor]) -> None:
        self._interceptors = interceptors
        self._group: Any = None

    @property
    def untried(self) -> bool:
        """Whether no block has run yet, so that it is unknown which of them issue collectives."""
        return all(interceptor.trusted is None for interceptor in self._interceptors)

    @property
    def needed(self) -> str | None:
        """Why ranks must decide alike, in words; None where each may decide for itself."""
        for interceptor in self._interceptors:
            if interceptor.collective_ranks:
                return f"block {interceptor.name!r} {_in_words(interceptor.module)}"
        return None

    def agree(self, choices: Mapping[Run, Option] | None) -> dict[Run, Option] | None:
        """What this rank's runs do; None if the step is observed.

        All ranks recompute the same runs. Whether bytes of a run wait in host memory is no concern
        of other ranks.

        `choices` is what this rank would do by itself, None if it would observe. All ranks that
        take part in each other's collectives must come here at the same point of their programs.
        """
        count = len(self._interceptors)
        common = self._largest(self._vector(choices))
        observe, distrusted, untried, numbers = _split(common, 1, count, count, count * _RUNS)
        self._follow(distrusted, untried)
        if observe[0]:
            return None
        return {
            run: Option.RECOMPUTE if numbers[_place(run)] and not own.recomputes else own
            for run, own in (choices or {}).items()
        }

    def any(self, flag: bool) -> bool:
        """Whether it holds on one of the ranks."""
        return bool(self._largest([int(flag)])[0])

    def _vector(self, choices: Mapping[Run, Option] | None) -> list[int]:
        numbers = [1] * (len(self._interceptors) * _RUNS)  # runs that no plan knows are recomputed
        for run in choices or ():
            numbers[_place(run)] = 0
        for run, option in (choices or {}).items():
            numbers[_place(run)] |= option.recomputes
        distrusted = [int(interceptor.trusted is False) for interceptor in self._interceptors]
        untried = [int(interceptor.trusted is None) for interceptor in self._interceptors]
        return [int(choices is None), *distrusted, *untried, *numbers]

    def _largest(self, own: list[int]) -> list[int]:
        """The largest of each number over the ranks."""
        if self._group is None:
            self._group = self._meet()
        numbers = torch.tensor(own, dtype=torch.int32, device="cpu")  # whatever the default is
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        common: list[int] = numbers.tolist()
        return common

    def _meet(self) -> Any:
        ranks = sorted(
            frozenset().union(*(interceptor.collective_ranks for interceptor in self._interceptors))
        )
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        counts = torch.tensor([len(self._interceptors), -len(self._interceptors)], device="cpu")
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
        most, fewest = int(counts[0]), -int(counts[1])
        if most != fewest:
            raise ConflictError(
                f"{self.needed}, so ranks {ranks} must recompute the same blocks, but one has "
                f"{most} blocks and another {fewest}. Attach mimose to the same blocks on every "
                "rank, or leave out the blocks that communicate with other ranks: exclude="
            )
        return group

    def _follow(self, distrusted: list[int], untried: list[int]) -> None:
        """What one rank cannot recompute none does; what one has not tried all try again."""
        for interceptor, bad, new in zip(self._interceptors, distrusted, untried, strict=True):
            if bad:
                interceptor.follow(False)
            elif new:
                interceptor.follow(None)


_RUNS = 16
"""Runs of one block in a step that are told apart; later ones share the last place."""


def _place(run: Run) -> int:
    index, nth = run
    return index * _RUNS + min(nth, _RUNS - 1)


def _split(numbers: list[int], *lengths: int) -> list[list[int]]:
    parts, at = [], 0
    for length in lengths:
        parts.append(numbers[at : at + length])
        at += length
    return parts


def _in_words(block: nn.Module) -> str:
    """What makes a block communicate with other ranks, as far as its structure tells."""
    if any(isinstance(part, nn.SyncBatchNorm) for part in block.modules()):
        return "contains SyncBatchNorm, which exchanges statistics with other ranks"
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in block.modules()):
        return "is or contains an FSDP1 unit, which gathers its parameters in each forward"
    if any(hasattr(parameter, "ds_id") for parameter in block.parameters()):
        return "is partitioned by DeepSpeed ZeRO-3, which gathers parameters in each forward"
    return "issues collectives in its forward"


def why_not_alone(collectives: CollectivesIssued, *, in_forward: bool) -> str | None:
    """Why this rank must not run a step that has failed once more by itself; None if it may.

    `collectives` was made when the step began. As long as the rank has issued no collective, the
    others cannot tell its second try from its first: they wait for it in their backward.
    """
    if not is_distributed():
        return None
    others = sorted(collectives.ranks() - {dist.get_rank()})
    if others:
        return f"it has issued collectives with ranks {others}, which will not repeat them"
    if not in_forward:
        return "its forward had ended, so gradients may already be on their way to other ranks"
    return None
