"""Runs that are alike: while a step is observed, one that is recomputed tells of the others.

Most models are one block, many times over. Once a step has shown which runs cost the same, another
size can be observed while most blocks are kept: at least one of each kind is recomputed and looked
at, and what a kept one adds to the memory in use is held against what it should add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mimose.costs import (
    InputSize,
    InStep,
    Observation,
    Profile,
    Run,
    RunCost,
    StepObservation,
    peak,
)

_SAME = 0.005
"""The difference, as a share of what a run saves, up to which two runs are alike."""
_AS_EXPECTED = 0.02
"""The difference, likewise, up to which a kept run has added what it should."""
_FIXED = RunCost._fields.index("fixed")
_MOST_SCALING = 4.0
"""How much more than what was seen a size may take to be guessed from it."""


@dataclass(frozen=True, slots=True)
class SimilarBlocks:
    """Which runs of a step are alike, as one step has shown; and what they cost in it."""

    seen: StepObservation
    kinds: tuple[int, ...]
    """For each run the first one that it is like. The first and the last that can be recomputed are
    like no other: beside them are the model's own parts, or frozen ones."""

    def __len__(self) -> int:
        """How many kinds there are."""
        return len(set(self.kinds))

    @classmethod
    def among(cls, seen: StepObservation) -> SimilarBlocks:
        """The similar blocks of a step that was observed whole."""
        kinds = list(range(len(seen.runs)))
        inner = _moving(seen.runs)[1:-1]
        for at, k in enumerate(inner):
            known = dict.fromkeys(kinds[j] for j in inner[:at])
            kinds[k] = next((j for j in known if _alike(seen.runs[j], seen.runs[k])), k)
        return cls(seen, tuple(kinds))

    def sample(
        self,
        size: InputSize,
        others: Iterable[StepObservation],
        in_step: InStep,
        available_bytes: int,
        choose: Callable[[Profile, int], Sequence[bool]],
    ) -> Sample | None:
        """What to keep while a step of this size is observed; None if nothing can be.

        `others` are what was seen besides; `choose` tells what to recompute of a profile in so
        many bytes.
        """
        same = [self.seen, *(other for other in others if other.pattern == self.seen.pattern)]
        guess = _chord(same, size) or _scaled(same, size)
        if guess is None:
            return None
        profile = guess.in_step(*in_step)
        chosen = choose(profile, available_bytes)
        choices = [again or run.fixed for again, run in zip(chosen, profile.runs, strict=True)]
        moving = _moving(profile.runs)
        for k in (*moving[:1], *moving[-1:]):
            choices[k] = True
        for kind in dict.fromkeys(self.kinds):
            members = [k for k, of in enumerate(self.kinds) if of == kind]
            if not any(choices[k] for k in members):
                choices[members[-1]] = True
        if all(choices) or peak(profile, choices) > available_bytes:
            return None
        return Sample(self, dict(zip(self.seen.pattern, choices, strict=True)))

    def speaks_of(self, partly: StepObservation) -> bool:
        """Whether a step was of the kind in which these similar blocks were found."""
        same = partly.pattern == self.seen.pattern
        return same and partly.gradients_born == self.seen.gradients_born

    def complete(self, partly: StepObservation, kept: Sequence[bool]) -> StepObservation | None:
        """The observation of a step of this pattern, some runs of which were kept, as if none had.

        None if a kept run added something else to the memory in use than a similar one would have,
        or rose higher.
        """
        runs, above = [], 0
        for k, run in enumerate(partly.runs):
            start = run.start_bytes - above
            if not kept[k]:
                runs.append(_moved(run, start))
                continue
            at = self._teller(k, kept)
            teller = partly.runs[at]
            added = partly.runs[k + 1].start_bytes - run.start_bytes
            growth = added - (partly.runs[at + 1].start_bytes - teller.start_bytes)
            most = _AS_EXPECTED * teller.saved_bytes
            higher = run.forward_bytes - run.start_bytes - max(teller.spike_bytes, added)
            if abs(growth - teller.cost().growth) > most or higher > most:
                return None
            runs.append(replace(_moved(teller, start), born_bytes=run.born_bytes))
            above += growth
        return replace(
            partly,
            runs=tuple(runs),
            head_forward_bytes=partly.head_forward_bytes - above,
            head_backward_bytes=partly.head_backward_bytes - above,
        )

    def saves_its_output(self, run: Run) -> bool:
        """Whether a kept run, by what was seen of it, keeps its output itself."""
        known = dict(zip(self.seen.pattern, self.seen.runs, strict=True)).get(run)
        return known is not None and known.out_saved_bytes > 0

    def _teller(self, k: int, kept: Sequence[bool]) -> int:
        alike = (j for j, kind in enumerate(self.kinds) if kind == self.kinds[k])
        return next(j for j in alike if not kept[j])


class Sample(NamedTuple):
    """A step that is observed in part: what is recomputed in it, and who tells of the rest."""

    similar: SimilarBlocks
    again: Mapping[Run, bool]


def _moving(runs: Sequence[Observation | RunCost]) -> list[int]:
    """Those that can be recomputed."""
    return [k for k, run in enumerate(runs) if not run.fixed]


def _alike(a: Observation, b: Observation) -> bool:
    if a.fixed or b.fixed:
        return False
    pairs = zip(_own(a), _own(b), strict=True)
    return all(abs(x - y) <= _SAME * a.saved_bytes for x, y in pairs)


def _own(run: Observation) -> tuple[int, ...]:
    """What a run costs, wherever in the step it is."""
    return (
        run.entry_bytes - run.start_bytes,
        run.saved_bytes,
        run.spike_bytes,
        run.back_bytes,
        run.out_saved_bytes,
        run.in_idle_bytes,
        run.input_bytes,
    )


def _moved(run: Observation, start: int) -> Observation:
    """The same run where so much is in use when it starts."""
    by = start - run.start_bytes
    return replace(
        run,
        start_bytes=start,
        forward_bytes=run.forward_bytes + by,
        entry_bytes=run.entry_bytes + (0 if run.fixed else by),
        gap_bytes=run.gap_bytes + by,
    )


def _chord(seen: Sequence[StepObservation], size: InputSize) -> Profile | None:
    """What lies on the line between the next smaller and the next larger size, if both were seen.

    No less than the size takes: memory grows with size, and ever faster.
    """
    larger = [o for o in seen if size <= o.size]
    smaller = [o for o in seen if o.size <= size]
    if not larger or not smaller:
        return None
    high = min(larger, key=lambda o: o.head_forward_bytes)
    low = max(smaller, key=lambda o: o.head_forward_bytes)
    share = max(size.shares_between(low.size, high.size), default=1.0)
    return _each(high.profile(), low.profile(), lambda b, a: max(a, math.ceil(a + share * (b - a))))


def _scaled(seen: Sequence[StepObservation], size: InputSize) -> Profile | None:
    """What the nearest size takes, times what a larger one may take more."""
    nearest = min(seen, key=lambda o: (_growth(o.size, size), o.head_forward_bytes))
    factor = _growth(nearest.size, size)
    if factor > _MOST_SCALING:
        return None
    profile = nearest.profile()
    return _each(profile, profile, lambda a, _: math.ceil(a * factor)) if factor > 1 else profile


def _each(one: Profile, other: Profile, of: Callable[[int, int], int]) -> Profile:
    """The profile whose bytes come from those of two; with the times of the first."""
    runs = (
        RunCost._make((*map(of, a[:_FIXED], b[:_FIXED]), *a[_FIXED:]))
        for a, b in zip(one.runs, other.runs, strict=True)
    )
    names = ("head_forward", "head_backward", "tail")
    head_and_tail = (of(getattr(one, name), getattr(other, name)) for name in names)
    return Profile(one.size, tuple(runs), *head_and_tail)


def _growth(seen: InputSize, size: InputSize) -> float:
    """By how much a size may take more memory than one that was seen, at most.

    The square of what the elements of a tensor grow by, of the one that grows the most.
    """
    if seen.layout != size.layout:
        return math.inf
    shares = [max(1.0, b / a) if a else math.inf for a, b in zip(seen.dims, size.dims, strict=True)]
    factor, at = 1.0, 0
    for _, rank in size.layout:
        factor = max(factor, math.prod(share**2 for share in shares[at : at + rank]))
        at += rank
    return factor
