"""Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016)."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from mimose.comparison.evaluation import evaluate
from mimose.comparison.schedules import (
    Backward,
    Drop,
    Forward,
    Item,
    Operation,
    Recompute,
    Schedule,
)
from mimose.comparison.stages import Chain, Outcome
from mimose.costs import Profile

Segments = tuple[range, ...]


@final
class Sublinear:
    """Cut the chain into segments; keep the input of each, recompute a segment as a whole.

    Stages join a segment until their bytes exceed a budget for one segment; then the next segment
    begins. All segments but the last drop everything, inputs between their stages included, and run
    once more before their backwards. On n equal stages the best cut has about √n segments, and
    memory grows with √n, for one more forward. The paper searches the segments' budget; here every
    budget is tried that gives a cut of its own. Of the cuts that fit, the one with the least extra
    time is taken: the one whose last segment, which is kept, takes longest. If no cut fits, it is
    the one with the least memory.

    A stage that cannot be recomputed is a segment of its own, and kept.
    """

    def schedule(self, profile: Profile, available_bytes: int) -> Outcome:
        """The segments for this many bytes above the step's start."""
        chain = Chain.of(profile)
        model, least = chain.as_profile(), None
        for segments in sorted(_cuts(chain), key=lambda cut: _kept_nanoseconds(chain, cut)):
            schedule = schedule_of_segments(chain, segments)
            peak = evaluate(model, schedule).peak_bytes
            if least is None or peak < least[0] or peak <= available_bytes:
                least = peak, schedule
            if peak <= available_bytes:  # the first that fits takes the least time
                break
        return Outcome.of(profile, least[1] if least else (), available_bytes)


def _kept_nanoseconds(chain: Chain, segments: Segments) -> int:
    """Less than zero: the time of the last segment, which is not recomputed."""
    return -sum(chain.stages[k].nanoseconds for segment in segments[-1:] for k in segment)


def _cuts(chain: Chain) -> set[Segments]:
    """A cut for each budget of a segment that makes a difference."""
    sizes = [stage.saved_bytes + stage.input_bytes for stage in chain.stages]
    totals = [0]
    for size in sizes:
        totals.append(totals[-1] + size)
    budgets = {after - before for i, before in enumerate(totals) for after in totals[i:]}
    return {_cut(chain, sizes, budget) for budget in budgets}


def _cut(chain: Chain, sizes: list[int], budget: int) -> Segments:
    """Segments whose bytes stay within a budget, if more than one stage is in them."""
    starts, filled = [0], 0
    for k, (stage, size) in enumerate(zip(chain.stages, sizes, strict=True)):
        alone = stage.fixed or (k > 0 and chain.stages[k - 1].fixed)
        if k and (alone or filled + size > budget):
            starts.append(k)
            filled = 0
        filled += size
    return tuple(range(a, b) for a, b in pairwise([*starts, len(sizes)]) if a < b)


def schedule_of_segments(chain: Chain, segments: Segments) -> Schedule:
    """All segments but the last are dropped, and recomputed as a whole before their backwards."""
    forwards: list[Operation] = []
    backwards: list[Operation] = []
    for segment in segments:
        fixed = any(chain.stages[k].fixed for k in segment)
        keep = fixed or segment == segments[-1]
        forwards += _sweep(segment, keep, fixed)
        again = [] if keep else _recompute(segment)
        backwards[:0] = [*again, *(Backward(k) for k in reversed(segment))]
    return (*forwards, *backwards)


def _sweep(segment: range, keep: bool, fixed: bool) -> list[Operation]:
    """The first forwards. Only the input of a segment that is recomputed is still needed."""
    operations: list[Operation] = []
    for k in segment:
        operations.append(Forward(k, keep))
        if not fixed and (keep or k > segment.start):
            operations.append(Drop(Item.INPUT, k))
    return operations


def _recompute(segment: range) -> list[Operation]:
    """Every stage once more. What a stage does not save of its input is freed behind it, except for
    the segment's own input."""
    operations: list[Operation] = []
    for k in segment:
        operations.append(Recompute(k, keep=True))
        if k > segment.start:
            operations.append(Drop(Item.INPUT, k))
    return operations
