"""The memory of a step, moment by moment: plain arithmetic on a profile.

A profile holds what each run of a block costs at one input size; a plan says which runs are
recomputed. Bytes are counted from the memory in use when the first block starts. With K the bytes
kept by earlier runs:

    before run k        K + gap[k]                                         since the run before it
    run k recomputed    K + F[k]                                           in its forward
                        K + entry[k] + max(spike[k], saved[k] + back[k])   in its backward
    run k kept          K + start[k] + spike[k]                            in its forward
                        K + entry[k] − in_idle[k] + saved[k] + back[k]     in its backward
                        and K grows by saved[k] − out_saved[k] − in_idle[k]
    after the forwards  K + head
    after the backwards tail

The peak is the largest of these. A run that keeps its output itself (a final ReLU) shares it with
its successor's input, or with whoever else holds it until the backward, hence `out_saved`. One that
does not save its input (its first operator casts it, say) lets go of it when kept, while a
recompute needs it, hence `in_idle`.

Two things depend on the step rather than on the size: gradients that come into being in it
(`born`), and outputs of the last step that are alive when the forward starts and gone in the
backward (`stale`). And a backward that keeps its graph (`retain_graph=True`) frees nothing that a
run has kept: then K stays what it is after the forwards, and a second backward finds all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mimose.costs.input_size import InputSize


class RunCost(NamedTuple):
    """What one run of a block costs, in bytes above the step's start, and in nanoseconds."""

    start: int
    """In use when its forward starts."""
    forward: int
    """Peak from the start of its forward to the start of the next run's: F."""
    entry: int
    """In use just before its recompute, once stale outputs are gone."""
    saved: int
    """The price of keeping it."""
    spike: int
    """Peak of its recompute above what was in use before."""
    back: int
    """Peak of its backward above what is in use once its activations are there."""
    out_saved: int
    """Bytes of its own output that it saves itself, and that live until the backward anyway."""
    in_idle: int
    """Bytes of its input that it does not save: held for a recompute alone."""
    gap: int = 0
    """Peak between the end of the run before it and its own start."""
    nanoseconds: int = 0
    """Time of its recompute."""
    fixed: bool = False
    """Whether it cannot be recomputed (or has nothing to recompute)."""
    input: int = 0
    """Bytes of its tensor arguments: by these a run is known that is larger than its kind."""

    @property
    def needs(self) -> tuple[int, int, int, bool]:
        """Bytes above K while it runs, if it is recomputed and if it is kept; what K grows by if it
        is kept; and whether it is fixed.

        All at once, and in plain comparisons: planners ask it of every run, again and again.
        """
        start, forward, entry, saved, spike, back, out_saved, in_idle, gap, _, fixed, _ = self
        above = saved + back
        again = forward if forward > gap else gap
        if not fixed:
            rebuilt = entry + (spike if spike > above else above)
            again = rebuilt if rebuilt > again else again
        first, second = start + spike, entry - in_idle + above
        kept = first if first > second else second
        growth = saved - out_saved - in_idle
        return again, kept if kept > gap else gap, growth if growth > 0 else 0, fixed

    @property
    def need_recomputed(self) -> int:
        """Bytes above K while it runs, if it is recomputed."""
        return self.needs[0]

    @property
    def need_kept(self) -> int:
        """Bytes above K while it runs, if it is kept."""
        return self.needs[1]

    @property
    def growth(self) -> int:
        """What K grows by if it is kept."""
        return self.needs[2]


TAKEN_OFF = ("out_saved", "in_idle")
"""What of a run is subtracted: where in doubt, its lower end is the safe one."""

InStep = tuple[tuple[int, ...], int, int, bool, int]
"""What `Profile.in_step` takes: gradients that are born before each run, what is given back in the
backward, all born ones, whether the graph outlives it, and what other handles' steps do beside."""

_run = RunCost._make


@dataclass(frozen=True, slots=True)
class Profile:
    """The predicted costs of every run at one input size."""

    size: InputSize
    runs: tuple[RunCost, ...]
    head_forward: int
    """Peak after the last run's forward and before the model's return."""
    head_backward: int
    """Peak from there to the first recompute."""
    tail: int = 0
    """Peak after the first run's backward: embeddings. Nothing of the blocks is left by then."""

    prelude: int = 0
    """What the model holds at the step's start, beyond what was in use before: embeddings."""

    @property
    def head(self) -> int:
        return max(self.head_forward, self.head_backward)

    def in_step(
        self,
        born_bytes: Sequence[int],
        stale_bytes: int,
        all_born_bytes: int = 0,
        retained: bool = False,
        beside_bytes: int = 0,
    ) -> Profile:
        """The same, in a step in which these gradients are born and these outputs are stale.

        `born_bytes` are there before each run's recompute, `all_born_bytes` by the end of all.
        `retained` is a step whose backward keeps its graph, for another one to come. Steps of other
        handles rise by `beside_bytes` while all that is kept is there.
        """
        if not (stale_bytes or all_born_bytes or any(born_bytes) or retained or beside_bytes):
            return self
        runs = tuple(
            [
                _run((start, forward, entry + born - stale_bytes, *others))
                for (start, forward, entry, *others), born in zip(
                    self.runs, born_bytes, strict=True
                )
            ]
        )
        head, tail = self.head_backward - stale_bytes, self.tail + all_born_bytes - stale_bytes
        if retained:
            head = self._highest_backward() + all_born_bytes - stale_bytes
        head_forward = max(self.head_forward, beside_bytes)
        return Profile(self.size, runs, head_forward, head, tail, self.prelude)

    def _highest_backward(self) -> int:
        """The highest moment of the backward above K, where K stays what it is.

        As if every run were recomputed: if none is, it is a little lower.
        """
        rebuilt = (run.entry + max(run.spike, run.saved + run.back) for run in self.runs)
        return max(self.head_backward, self.tail, *rebuilt)


def levels(profile: Profile, recompute: Sequence[bool]) -> tuple[int, ...]:
    """The bytes in use above the step's start when each run's forward starts."""
    kept, at_start = 0, []
    for run, again in zip(profile.runs, recompute, strict=True):
        at_start.append(kept + run.start)
        kept += 0 if again or run.fixed else run.growth
    return tuple(at_start)


def peak(profile: Profile, recompute: Sequence[bool]) -> int:
    """The peak of a step above its start, if these runs are recomputed and the others kept."""
    kept = 0
    highest = 0
    for run, again in zip(profile.runs, recompute, strict=True):
        again_bytes, kept_bytes, growth, fixed = run.needs
        if again or fixed:
            highest = max(highest, kept + again_bytes)
        else:
            highest = max(highest, kept + kept_bytes)
            kept += growth
    return max(highest, kept + profile.head, profile.tail)


def recompute_nanoseconds(profile: Profile, recompute: Sequence[bool]) -> int:
    """The time that a plan spends recomputing."""
    return sum(
        run.nanoseconds
        for run, again in zip(profile.runs, recompute, strict=True)
        if again and not run.fixed
    )
