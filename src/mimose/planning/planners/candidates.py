"""The best plan found so far in a search, and improvements of it by small changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from mimose.costs import Moments, Option, OptionCost, Profile, Schedule, costs_of, transfers_of
from mimose.planning.planners.least_time import LeastTime
from mimose.planning.planners.pareto import NO_BOUND, may_use

Choices = tuple[Option, ...]

_NEGLIGIBLE = 0.002
"""A smaller gain, as a fraction of the step's time, is not worth searching for."""


class Candidates:
    """The best choices so far for a profile with a link, compared by the exact timeline."""

    def __init__(self, profile: Profile, available: int) -> None:
        assert profile.link is not None
        self.link = profile.link
        self._profile, self._available = profile, available
        self.best: Choices | None = None
        self.least = (NO_BOUND, 0)
        """The extra time of the best choices, and the bytes that they move."""
        self._costs = [
            {cost.option: cost for cost in run.menu if may_use(profile, cost.option)}
            for run in profile.runs
        ]
        self.saved: dict[int, OptionCost] = {}
        """The cost of each run that can be saved on the host."""
        self.inputs: dict[int, OptionCost] = {}
        """The cost of each run that can be recomputed from an input on the host."""
        for k, run in enumerate(profile.runs[:-1]):
            on_host, from_host = run.saved_on_host(), run.recomputed_from_host()
            for costs, cost in ((self.saved, on_host), (self.inputs, from_host)):
                if cost is not None and may_use(profile, cost.option):
                    costs[k] = self._costs[k][cost.option] = cost
        self.recomputable = [k for k, costs in enumerate(self._costs) if Option.RECOMPUTE in costs]
        self._shares_outputs = any(run.output_saved for run in profile.runs)
        recomputes = {k: self._costs[k][Option.RECOMPUTE] for k in self.recomputable}
        self.least_time = LeastTime(profile, available, recomputes)
        self.step_nanoseconds = _step_nanoseconds(profile)
        self.negligible = round(_NEGLIGIBLE * self.step_nanoseconds)
        """A gain in nanoseconds that is not worth searching for."""
        first_movable = min([*self.saved, *self.inputs], default=len(profile.runs))
        self._good_enough = self.least_time.overall(first_movable) + self.negligible

    def moments(self, choices: Choices) -> Moments:
        """The timeline of these choices."""
        if self._shares_outputs:
            return Moments(self._profile, costs_of(self._profile, choices))
        costs = [costs[option] for costs, option in zip(self._costs, choices, strict=True)]
        return Moments(self._profile, costs)

    def offer(self, choices: Choices) -> bool:
        """Make these choices the best if they fit and beat the best so far.

        They beat it with less time, or with the same time and fewer moved bytes. Returns whether
        they do.
        """
        moments = self.moments(choices)
        moved = sum([transfer.moved_bytes for transfer in moments.schedule.transfers])
        value = moments.extra_nanoseconds, moved
        fits = moments.peak <= self._available and moved <= self.link.host_bytes
        if not fits or value >= self.least:
            return False
        self.best, self.least = choices, value
        return True

    def recompute_time(self, choices: Choices) -> int:
        """The time of the recomputes, without waiting for transfers."""
        costs = zip(self._costs, choices, strict=True)
        return sum([costs[option].nanoseconds for costs, option in costs])

    def schedule(self, on_host: Sequence[int], recomputed: Iterable[int]) -> Schedule:
        """The transfers if these runs are saved on the host, and those recomputed."""
        costs = [costs[Option.KEEP] for costs in self._costs]
        for k in recomputed:
            costs[k] = self._costs[k][Option.RECOMPUTE]
        for k in on_host:
            costs[k] = self.saved[k]
        return transfers_of(self._profile, costs)

    def on_host(self) -> list[int]:
        """The runs that the best choices save on the host."""
        return [k for k, o in enumerate(self.best or ()) if o is Option.SAVE_ON_HOST]

    def recomputed(self) -> list[int]:
        """The runs that the best choices recompute."""
        return [k for k, option in enumerate(self.best or ()) if option.recomputes]

    @property
    def good_enough(self) -> bool:
        """Whether no choices can be noticeably better than the best so far."""
        return self.least[0] <= self._good_enough

    def polish(self, changes: int) -> None:
        """Change one choice or two as long as that is better; try at most `changes` changes."""
        improved = self.best is not None
        while improved and self.best is not None:
            improved = False
            for choices in self._neighbours(self.best):
                changes -= 1
                if changes < 0:
                    return
                if self.offer(choices):
                    improved = True
                    break

    def _neighbours(self, choices: Choices) -> Iterator[Choices]:
        """Choices that differ in one run or two and may be better.

        Those that are too slow by their recomputes alone, or hold too much when the backward
        begins, are left out.
        """
        now = [costs[option] for costs, option in zip(self._costs, choices, strict=True)]
        time = sum(cost.nanoseconds for cost in now)
        room = self._available - self._profile.head_backward
        room -= sum(cost.backward_held - cost.backward_freed for cost in now)
        changes = [
            (k, option, cost.nanoseconds - now[k].nanoseconds, _held(cost) - _held(now[k]))
            for k, costs in enumerate(self._costs)
            for option, cost in costs.items()
            if option is not choices[k]
        ]
        for k, option, more_time, more_held in changes:
            if time + more_time <= self.least[0] and more_held <= room:
                yield (*choices[:k], option, *choices[k + 1 :])
        for (j, one, time_1, held_1), (k, two, time_2, held_2) in combinations(changes, 2):
            if j != k and time + time_1 + time_2 <= self.least[0] and held_1 + held_2 <= room:
                yield (*choices[:j], one, *choices[j + 1 : k], two, *choices[k + 1 :])


def _held(cost: OptionCost) -> int:
    """What a run holds when the first backward begins."""
    return cost.backward_held - cost.backward_freed


def _step_nanoseconds(profile: Profile) -> int:
    """The time of all forwards and backwards, without recomputes."""
    return sum(r.nanoseconds + (r.backward_nanoseconds or r.nanoseconds) for r in profile.runs)
