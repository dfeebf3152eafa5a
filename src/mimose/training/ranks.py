"""Several processes train one model: when they must make the same decisions.

Usually each rank plans for its own batch. A recompute only repeats arithmetic, and DDP and FSDP2
issue the same collectives in the same order whatever is recomputed. But if a block's forward issues
collectives (synchronized norms, tensor- or expert-parallel layers, FSDP units inside the block),
its recompute issues them again, and a rank that recomputes would wait for one that keeps. Then the
ranks agree first: a block is recomputed on all ranks if one rank needs that, and a step is observed
on all ranks if one rank must observe it.
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
    """Makes ranks recompute the same blocks, if a recompute issues collectives.

    This takes one small all-reduce per step among the ranks of these collectives. It runs on the
    CPU, in its own gloo group, so no GPU waits for it. A block is recomputed on all of these ranks
    if the plan of one recomputes it. A step is observed on all if one must observe it. A block that
    one rank cannot recompute is recomputed on none.
    """

    def __init__(self, interceptors: Sequence[BlockInterceptor]) -> None:
        self._interceptors = interceptors
        self._group: Any = None

    @property
    def untried(self) -> bool:
        """Whether no block has run yet, so that it is unknown which blocks issue collectives."""
        return all(interceptor.trusted is None for interceptor in self._interceptors)

    @property
    def needed(self) -> str | None:
        """Why ranks must make the same decisions, in words; None if each may decide for itself."""
        for interceptor in self._interceptors:
            if interceptor.collective_ranks:
                return f"block {interceptor.name!r} {_in_words(interceptor.module)}"
        return None

    def agree(self, choices: Mapping[Run, Option] | None) -> dict[Run, Option] | None:
        """The choices for this rank's runs; None if the step is observed.

        All ranks recompute the same runs. Each rank decides alone which bytes wait in host memory.

        `choices` are those that this rank would make on its own, None if it would observe. All
        ranks that share collectives must call this at the same point of their programs.
        """
        count = len(self._interceptors)
        common = self._maximum_over_ranks(self._vector(choices))
        observe, distrusted, untried, numbers = _split(common, 1, count, count, count * _RUNS)
        self._adopt_verdicts(distrusted, untried)
        if observe[0]:
            return None
        return {
            run: Option.RECOMPUTE if numbers[_position(run)] and not own.recomputes else own
            for run, own in (choices or {}).items()
        }

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one of the ranks."""
        return bool(self._maximum_over_ranks([int(flag)])[0])

    def _vector(self, choices: Mapping[Run, Option] | None) -> list[int]:
        numbers = [1] * (
            len(self._interceptors) * _RUNS
        )  # runs outside of all plans are recomputed
        for run in choices or ():
            numbers[_position(run)] = 0
        for run, option in (choices or {}).items():
            numbers[_position(run)] |= option.recomputes
        distrusted = [int(interceptor.trusted is False) for interceptor in self._interceptors]
        untried = [int(interceptor.trusted is None) for interceptor in self._interceptors]
        return [int(choices is None), *distrusted, *untried, *numbers]

    def _maximum_over_ranks(self, own: list[int]) -> list[int]:
        """The maximum of each number over the ranks."""
        if self._group is None:
            self._group = self._new_group()
        numbers = torch.tensor(
            own, dtype=torch.int32, device="cpu"
        )  # the default device may be another
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        common: list[int] = numbers.tolist()
        return common

    def _new_group(self) -> Any:
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

    def _adopt_verdicts(self, distrusted: list[int], untried: list[int]) -> None:
        """Adopt the verdicts of other ranks.

        A block that one rank cannot recompute is recomputed on none; a block that one rank has not
        tried is tried again on all.
        """
        for interceptor, bad, new in zip(self._interceptors, distrusted, untried, strict=True):
            if bad:
                interceptor.follow(False)
            elif new:
                interceptor.follow(None)


_RUNS = 16
"""The number of runs of one block that are distinguished; later ones share the last position."""


def _position(run: Run) -> int:
    index, nth = run
    return index * _RUNS + min(nth, _RUNS - 1)


def _split(numbers: list[int], *lengths: int) -> list[list[int]]:
    parts, at = [], 0
    for length in lengths:
        parts.append(numbers[at : at + length])
        at += length
    return parts


def _in_words(block: nn.Module) -> str:
    """Why a block communicates with other ranks, in words; derived from its structure."""
    if any(isinstance(part, nn.SyncBatchNorm) for part in block.modules()):
        return "contains SyncBatchNorm, which exchanges statistics with other ranks"
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in block.modules()):
        return "is or contains an FSDP1 unit, which gathers its parameters in each forward"
    if any(hasattr(parameter, "ds_id") for parameter in block.parameters()):
        return "is partitioned by DeepSpeed ZeRO-3, which gathers parameters in each forward"
    return "issues collectives in its forward"


def why_not_alone(collectives: CollectivesIssued, *, in_forward: bool) -> str | None:
    """Why this rank must not retry a failed step on its own; None if it may.

    `collectives` was created when the step began. As long as this rank has issued no collective,
    a retry makes no difference to the other ranks: they wait for it in their backward.
    """
    if not is_distributed():
        return None
    others = sorted(collectives.ranks() - {dist.get_rank()})
    if others:
        return f"it has issued collectives with ranks {others}, which will not repeat them"
    if not in_forward:
        return "its forward had ended, so gradients may already be on their way to other ranks"
    return None
