"""What was measured of one step."""

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
"""Of `to_plain`. Format 1 had levels where there are increments now. Format 2 did not say whether a
run's input can be moved, nor how long its backward takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """One step, measured whole."""

    pattern: Pattern
    profile: Profile
    """What it cost, without the gradients that it allocated."""
    gradients_allocated: tuple[int, ...]
    """Gradients allocated in this step before each run's backward."""
    all_gradients_allocated: int | None = None
    """All of them, by the step's end: parameters that the loss does not reach get none. None if
    unknown."""
    allocates: bool = True
    """Whether the step allocated most gradients, rather than adding to existing ones."""
    retained: bool = False
    """Whether the graph outlived its backward."""
    provisional: bool = False
    """Whether it holds only until another step was observed: blocks were tried out in it, say."""

    @property
    def size(self) -> InputSize:
        return self.profile.size

    @property
    def runs(self) -> tuple[RunCost, ...]:
        return self.profile.runs

    @property
    def conditions(self) -> StepConditions:
        """The conditions that the step ran under, as far as they are in this observation."""
        by_end = self.all_gradients_allocated or max(self.gradients_allocated, default=0)
        return StepConditions(self.gradients_allocated, by_end)

    def joined(self, other: StepObservation) -> StepObservation:
        """The higher of both in every quantity, of what is subtracted the lower: what a step of
        this size may take."""
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
        """What the same step takes at most if its blocks run in another order.

        Each run may come first or last, so levels are the highest of all runs, and what is
        subtracted is the least. `StepConditions.retained` adds that everything kept may be there.
        """
        starts = list(accumulate(run.boundary for run in self.runs))
        start = max(starts)
        entry = max(0, *(s + run.backward_entry - start for s, run in zip(starts, self.runs)))  # noqa: B905
        between = max(
            s + run.between_blocks_peak - start for s, run in zip(starts, self.runs, strict=True)
        )
        least = {name: min(getattr(run, name) for run in self.runs) for name in SUBTRACTED}
        in_order = sorted(zip(self.pattern, self.runs, strict=True), key=lambda pair: pair[0])
        runs = [
            run._replace(
                boundary=start if k == 0 else 0,
                backward_entry=entry,
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

    def timed_as(self, other: StepObservation) -> StepObservation:
        """This one with the times of another, of the same runs."""
        pairs = zip(self.runs, other.runs, strict=True)
        runs = tuple(
            a._replace(nanoseconds=b.nanoseconds, backward_nanoseconds=b.backward_nanoseconds)
            for a, b in pairs
        )
        return self.with_runs(runs)

    def with_runs(self, runs: Sequence[RunCost]) -> StepObservation:
        """The same with other costs of its runs."""
        return replace(self, profile=replace(self.profile, runs=tuple(runs)))

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone, for files."""
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
        """What `to_plain` gave, of a model of so many blocks; a ValueError if it cannot be."""
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
        known, tail = plain.get("all_gradients", plain.get("all_born")), int(plain["tail"])
        if plain.get("format", 1) == 1 and gradients:  # it was without any gradient of the step
            tail += max(0, int(known or 0) - gradients[0])
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
            all_gradients_allocated=None if known is None else int(known),
            allocates=bool(plain.get("allocates", plain.get("gradients_born", True))),
            retained=bool(plain.get("retained", False)),
            provisional=bool(plain.get("provisional", False)),
        )


def in_one_order(one: Pattern, other: Pattern) -> bool:
    """Whether the runs that two steps have in common come in the same order in both."""
    common = set(one) & set(other)
    return [run for run in one if run in common] == [run for run in other if run in common]


_OLD_WIDTH = RunCost._fields.index("fixed") + 1
"""How many numbers formats 1 and 2 have for a run."""


def _higher(a: RunCost, b: RunCost) -> RunCost:
    higher = RunCost._make(map(max, a, b))
    lower = {name: min(getattr(a, name), getattr(b, name)) for name in SUBTRACTED}
    return higher._replace(input_movable=a.input_movable and b.input_movable, **lower)


def _runs_from_plain(plain: Mapping[str, Any]) -> tuple[tuple[RunCost, ...], tuple[int, ...]]:
    """The runs' costs, and the gradients allocated before each."""
    if plain.get("format", 1) == 1:
        return _from_levels(plain["runs"])
    gradients = tuple(map(int, plain["gradients"]))
    if len(gradients) != len(plain["runs"]):
        raise ValueError(f"gradients of {len(gradients)} runs where there are {plain['runs']}")
    return tuple(_checked(*run) for run in plain["runs"]), gradients


def _from_levels(rows: Sequence[Sequence[Any]]) -> tuple[tuple[RunCost, ...], tuple[int, ...]]:
    """The same from format 1, which had levels above the step's start."""
    runs, gradients, before = [], [], 0
    for row in rows:
        start, forward, entry, born, saved, spike, back, own, idle, seconds, fixed, _, *gap = row
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a recompute cannot take {seconds} seconds")
        runs.append(
            _checked(
                start - before,
                forward - start,
                0 if fixed else entry - start,
                saved,
                spike,
                back,
                own,
                idle,
                (gap[0] if gap else 0) - start,
                0,
                round(seconds * 1e9),
                fixed,
            )
        )
        gradients.append(int(born))
        before = start
    return tuple(runs), tuple(gradients)


def _checked(*numbers: Any) -> RunCost:
    *whole, fixed, movable, backward = numbers if len(numbers) > _OLD_WIDTH else (*numbers, 0, 0)
    run = RunCost._make((*map(int, whole), bool(fixed), bool(movable), int(backward)))
    if min(run.saved, run.recompute_peak, run.nanoseconds, run.backward_nanoseconds) < 0:
        raise ValueError(f"no run costs {run}")
    return run
