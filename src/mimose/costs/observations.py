"""The measurements of one step, and their form in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from mimose.costs.input_size import InputSize
from mimose.costs.run_cost import SUBTRACTED, RunCost
from mimose.costs.timeline import Profile, StepConditions

Run = tuple[int, int]
"""A block's index, and which call of the block in this step it is (0 = first)."""

Pattern = tuple[Run, ...]
"""The runs of a step, in the order of their forwards."""

FORMAT = 3
"""The version of `to_plain`. Format 1 had levels instead of increments. Format 2 lacked
`input_movable` and `backward_nanoseconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """The measured costs of all runs of one step."""

    pattern: Pattern
    profile: Profile
    """Its costs, without the gradients that it allocated."""
    gradients_allocated: tuple[int, ...]
    """Bytes of gradients that the step had allocated before each run's backward."""
    all_gradients_allocated: int | None = None
    """Bytes of gradients that the whole step allocated; parameters that the loss does not reach get
    none. None if unknown."""
    allocates: bool = True
    """Whether the step allocated most gradients, rather than adding to existing ones."""
    retained: bool = False
    """Whether the backward retained the graph."""
    provisional: bool = False
    """Whether the next observation replaces it: blocks were tried out in this step, for example."""

    @property
    def size(self) -> InputSize:
        return self.profile.size

    @property
    def runs(self) -> tuple[RunCost, ...]:
        return self.profile.runs

    @property
    def conditions(self) -> StepConditions:
        """The conditions of the step, as far as this observation has them."""
        by_end = self.all_gradients_allocated or max(self.gradients_allocated, default=0)
        return StepConditions(self.gradients_allocated, by_end)

    def joined(self, other: StepObservation) -> StepObservation:
        """An upper bound of both, for a model whose memory depends on more than the size.

        Each quantity is the maximum; a subtracted one is the minimum.
        """
        mine, theirs = self.profile, other.profile
        return replace(
            other,
            profile=replace(
                theirs,
                runs=tuple(map(_higher, mine.runs, theirs.runs)),
                head_forward=max(mine.head_forward, theirs.head_forward),
                head_backward=max(mine.head_backward, theirs.head_backward),
                tail=max(mine.tail, theirs.tail),
            ),
        )

    def in_any_order(self) -> StepObservation:
        """An upper bound of this step's costs for any order of its blocks.

        Each run may come first or last, so levels are the maximum of all runs, and subtracted
        quantities the minimum. `StepConditions.retained` accounts for everything that is kept.
        """
        starts = list(accumulate(run.boundary for run in self.runs))
        highest = max(starts)
        pairs = list(zip(starts, self.runs, strict=True))
        entry = max(start + run.backward_entry - highest for start, run in pairs)
        between = max(start + run.between_blocks_peak - highest for start, run in pairs)
        least = {name: min(getattr(run, name) for run in self.runs) for name in SUBTRACTED}
        in_order = sorted(zip(self.pattern, self.runs, strict=True), key=lambda pair: pair[0])
        runs = [
            run._replace(
                boundary=highest if k == 0 else 0,
                backward_entry=max(0, entry),
                recompute_peak=max(run.recompute_peak, run.forward_peak),
                between_blocks_peak=max(0, between),
                input_movable=False,
                **least,
            )
            for k, (_, run) in enumerate(in_order)
        ]
        allocated = max(self.all_gradients_allocated or 0, *self.gradients_allocated)
        return replace(
            self,
            pattern=tuple(run for run, _ in in_order),
            profile=replace(self.profile, runs=tuple(runs)),
            gradients_allocated=(allocated,) * len(runs),
        )

    def timed_as(self, other: StepObservation | Profile) -> StepObservation:
        """A copy with the times of another observation, or a profile, of the same runs."""
        runs = [
            run._replace(
                nanoseconds=timed.nanoseconds, backward_nanoseconds=timed.backward_nanoseconds
            )
            for run, timed in zip(self.runs, other.runs, strict=True)
        ]
        return self.with_runs(runs)

    def with_runs(self, runs: Sequence[RunCost]) -> StepObservation:
        """A copy with other costs of its runs."""
        return replace(self, profile=replace(self.profile, runs=tuple(runs)))

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, for JSON."""
        profile = self.profile
        return {
            "format": FORMAT,
            "layout": [list(tensor) for tensor in self.size.layout],
            "dims": list(self.size.dims),
            "pattern": [list(run) for run in self.pattern],
            "runs": [list(run) for run in self.runs],
            "head": [profile.head_forward, profile.head_backward],
            "tail": profile.tail,
            "prelude": profile.prelude,
            "gradients": list(self.gradients_allocated),
            "all_gradients": self.all_gradients_allocated,
            "allocates": self.allocates,
            "retained": self.retained,
            "provisional": self.provisional,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], blocks: int | None = None) -> StepObservation:
        """The inverse of `to_plain`, also for older formats; a ValueError if numbers are invalid.

        `blocks` is the number of blocks of the model; None skips the check against it.
        """
        layout = tuple((str(name), int(rank)) for name, rank in plain["layout"])
        size = InputSize(layout, tuple(map(int, plain["dims"])))
        pattern = tuple((int(block), int(nth)) for block, nth in plain["pattern"])
        if len(size.dims) != sum(rank for _, rank in layout) or min(size.dims, default=0) < 0:
            raise ValueError(f"{list(size.dims)} are not the dimensions of {layout}")
        if len(pattern) != len(plain["runs"]) or len(set(pattern)) < len(pattern):
            raise ValueError(f"there are {len(plain['runs'])} runs in a pattern of {len(pattern)}")
        if blocks is not None and not all(0 <= block < blocks for block, _ in pattern):
            raise ValueError(f"a model of {blocks} blocks cannot have the runs {pattern}")
        runs, gradients = _runs_from_plain(plain)
        head_forward, head_backward = map(int, plain["head"])
        in_all, tail = plain.get("all_gradients", plain.get("all_born")), int(plain["tail"])
        if plain.get("format", 1) == 1 and gradients:  # its tail excludes all gradients of the step
            tail += max(0, int(in_all or 0) - gradients[0])
        return cls(
            pattern=pattern,
            profile=Profile(
                size,
                runs,
                head_forward,
                head_backward,
                tail,
                None if plain["prelude"] is None else int(plain["prelude"]),
            ),
            gradients_allocated=gradients,
            all_gradients_allocated=None if in_all is None else int(in_all),
            allocates=bool(plain.get("allocates", plain.get("gradients_born", True))),
            retained=bool(plain.get("retained", False)),
            provisional=bool(plain.get("provisional", False)),
        )


def in_one_order(one: Pattern, other: Pattern) -> bool:
    """Whether the runs that two patterns have in common come in the same order in both."""
    common = set(one) & set(other)
    return [run for run in one if run in common] == [run for run in other if run in common]


_OLD_FIELDS = RunCost._fields.index("fixed") + 1
"""The number of fields of a run in formats 1 and 2."""


def _higher(a: RunCost, b: RunCost) -> RunCost:
    """The costs of one run, at least as high as both."""
    higher = RunCost._make(map(max, a, b))
    lower = {name: min(getattr(a, name), getattr(b, name)) for name in SUBTRACTED}
    return higher._replace(input_movable=a.input_movable and b.input_movable, **lower)


def _runs_from_plain(plain: Mapping[str, Any]) -> tuple[tuple[RunCost, ...], tuple[int, ...]]:
    """The costs of the runs, and the gradients allocated before each run's backward."""
    if plain.get("format", 1) == 1:
        return _from_levels(plain["runs"])
    gradients = tuple(map(int, plain["gradients"]))
    if len(gradients) != len(plain["runs"]):
        raise ValueError(f"gradients of {len(gradients)} runs where there are {len(plain['runs'])}")
    return tuple(_checked(*run) for run in plain["runs"]), gradients


def _from_levels(rows: Sequence[Sequence[Any]]) -> tuple[tuple[RunCost, ...], tuple[int, ...]]:
    """The same from format 1, which had levels above the start of the step."""
    runs, gradients, previous_start = [], [], 0
    for row in rows:
        start, forward, entry, allocated, *costs, seconds, fixed, _, between = (
            row if len(row) > 12 else (*row, 0)
        )
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a recompute cannot take {seconds} seconds")
        runs.append(
            _checked(
                start - previous_start,
                forward - start,
                0 if fixed else entry - start,
                *costs,  # saved … droppable_input
                between - start,
                0,
                round(seconds * 1e9),
                fixed,
            )
        )
        gradients.append(int(allocated))
        previous_start = start
    return tuple(runs), tuple(gradients)


def _checked(*numbers: Any) -> RunCost:
    *whole, fixed, movable, backward = numbers if len(numbers) > _OLD_FIELDS else (*numbers, 0, 0)
    run = RunCost._make((*map(int, whole), bool(fixed), bool(movable), int(backward)))
    if min(run.saved, run.recompute_peak, run.nanoseconds, run.backward_nanoseconds) < 0:
        raise ValueError(f"a run cannot cost {run}")
    return run
