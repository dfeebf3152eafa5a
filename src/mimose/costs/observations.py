"""What was seen of a step in which every block was recomputed, and what of it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from mimose.costs.input_size import InputSize
from mimose.costs.timeline import TAKEN_OFF, Profile, RunCost

Run = tuple[int, int]
"""A block's index, and which call of the block in this step it is (0 = first)."""

Pattern = tuple[Run, ...]
"""The runs of a step, in the order of their forwards."""


_LEAST = tuple(f"{name}_bytes" for name in TAKEN_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One run's costs, seen once, at one input size. The words are those of `RunCost`."""

    start_bytes: int
    forward_bytes: int
    entry_bytes: int
    """Without gradients born in this step."""
    born_bytes: int
    """Gradients that did not exist at the step's start and did just before this recompute."""
    saved_bytes: int
    spike_bytes: int
    back_bytes: int
    out_saved_bytes: int
    in_idle_bytes: int
    seconds: float
    fixed: bool
    input_bytes: int = 0
    gap_bytes: int = 0

    def cost(self) -> RunCost:
        """The same as a prediction."""
        return RunCost(
            start=self.start_bytes,
            forward=self.forward_bytes,
            entry=self.entry_bytes,
            saved=self.saved_bytes,
            spike=self.spike_bytes,
            back=self.back_bytes,
            out_saved=self.out_saved_bytes,
            in_idle=self.in_idle_bytes,
            gap=self.gap_bytes,
            nanoseconds=round(self.seconds * 1e9),
            fixed=self.fixed,
            input=self.input_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """One step, seen whole."""

    size: InputSize
    pattern: Pattern
    runs: tuple[Observation, ...]
    head_forward_bytes: int
    """Peak after the last run and before the model's return."""
    head_backward_bytes: int
    """Peak from there to the first recompute, stale outputs gone."""
    tail_bytes: int
    """Peak after the first run's backward, stale outputs gone, without gradients born."""
    prelude_bytes: int | None
    """What the model holds when its first block starts, beyond what was in use before; None if
    nobody looked."""
    gradients_born: bool
    """Whether most gradients came into being in this step, rather than being added to."""
    all_born_bytes: int | None = None
    """All of them, by the step's end: parameters that the loss does not reach get none. None if
    nobody looked."""
    retained: bool = False
    """Whether the graph outlived its backward."""

    @property
    def born_bytes(self) -> tuple[int, ...]:
        """Gradients born before each run's recompute."""
        return tuple(run.born_bytes for run in self.runs)

    def joined(self, other: StepObservation) -> StepObservation:
        """The higher of both in every number, of what is taken off the lower: what a step of this
        size may take."""
        pairs = zip(self.runs, other.runs, strict=True)
        return replace(
            other,
            runs=tuple(_higher(a, b) for a, b in pairs),
            head_forward_bytes=max(self.head_forward_bytes, other.head_forward_bytes),
            head_backward_bytes=max(self.head_backward_bytes, other.head_backward_bytes),
            tail_bytes=max(self.tail_bytes, other.tail_bytes),
        )

    def in_any_order(self) -> StepObservation:
        """What the same step takes at most if its blocks run in another order.

        Levels are the highest of all runs, what is taken off is the least. That everything that is
        kept may be there when a run comes is for `Profile.in_step` to say.
        """
        runs = sorted(zip(self.pattern, self.runs, strict=True), key=lambda pair: pair[0])
        start = max(run.start_bytes for run in self.runs)
        entry = max(start, *(run.entry_bytes for run in self.runs))
        born = max(self.all_born_bytes or 0, *self.born_bytes)
        least = {name: min(getattr(run, name) for run in self.runs) for name in _LEAST}
        return replace(
            self,
            pattern=tuple(run for run, _ in runs),
            runs=tuple(
                replace(
                    run,
                    start_bytes=start,
                    forward_bytes=run.forward_bytes - run.start_bytes + start,
                    entry_bytes=entry,
                    born_bytes=born,
                    spike_bytes=max(run.spike_bytes, run.forward_bytes - run.start_bytes),
                    gap_bytes=max(run.gap_bytes for run in self.runs),
                    **least,
                )
                for _, run in runs
            ),
        )

    def timed_as(self, other: StepObservation) -> StepObservation:
        """This one with the times of another, of the same runs."""
        pairs = zip(self.runs, other.runs, strict=True)
        return replace(self, runs=tuple(replace(a, seconds=b.seconds) for a, b in pairs))

    def profile(self) -> Profile:
        """This observation as a prediction of its own size, without born gradients."""
        runs = tuple(run.cost() for run in self.runs)
        head = self.head_forward_bytes, self.head_backward_bytes
        return Profile(self.size, runs, *head, self.tail_bytes, self.prelude_bytes or 0)

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone, for files."""
        return {
            "layout": [list(tensor) for tensor in self.size.layout],
            "dims": list(self.size.dims),
            "pattern": [list(run) for run in self.pattern],
            "runs": [list(astuple(run)) for run in self.runs],
            "head": [self.head_forward_bytes, self.head_backward_bytes],
            "tail": self.tail_bytes,
            "prelude": self.prelude_bytes,
            "gradients_born": self.gradients_born,
            "all_born": self.all_born_bytes,
            "retained": self.retained,
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
            raise ValueError(f"of {blocks} blocks these are to run: {pattern}")
        return cls(
            size=size,
            pattern=pattern,
            runs=tuple(_run_from_plain(run) for run in plain["runs"]),
            head_forward_bytes=int(plain["head"][0]),
            head_backward_bytes=int(plain["head"][1]),
            tail_bytes=int(plain["tail"]),
            prelude_bytes=None if plain["prelude"] is None else int(plain["prelude"]),
            gradients_born=bool(plain["gradients_born"]),
            all_born_bytes=None if plain.get("all_born") is None else int(plain["all_born"]),
            retained=bool(plain.get("retained", False)),
        )


def in_one_order(one: Pattern, other: Pattern) -> bool:
    """Whether the runs that two steps have in common come in the same order in both."""
    common = set(one) & set(other)
    return [run for run in one if run in common] == [run for run in other if run in common]


def _higher(a: Observation, b: Observation) -> Observation:
    numbers = zip(Observation.__slots__, astuple(a), astuple(b), strict=True)
    safe = dict.fromkeys(_LEAST, min)
    return Observation(**{name: safe.get(name, max)(pair) for name, *pair in numbers})


def _run_from_plain(numbers: list[Any]) -> Observation:
    if len(numbers) == len(Observation.__slots__) - 1:  # older versions knew no gap
        numbers = [*numbers, 0]
    values = dict(zip(Observation.__slots__, numbers, strict=True))
    seconds, fixed = float(values.pop("seconds")), bool(values.pop("fixed"))
    sizes = {name: int(value) for name, value in values.items()}
    if not 0 <= seconds < float("inf") or min(sizes["saved_bytes"], sizes["spike_bytes"]) < 0:
        raise ValueError(f"no run takes {sizes} and {seconds} seconds")
    return Observation(**sizes, seconds=seconds, fixed=fixed)
