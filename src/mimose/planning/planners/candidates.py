"""Choices that may use host memory, compared by the exact timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from mimose.costs import Moments, Option, OptionCost, Profile, Schedule, costs_of, transfers_of
from mimose.planning.planners.pareto import NO_BOUND, may_use

Choices = tuple[Option, ...]

_NEGLIGIBLE = 0.002
"""The share of a step's time for which a better plan is not looked for."""


class Candidates:
    """The best choices so far for a profile with a link."""

    def __init__(self, profile: Profile, available: int) -> None:
        assert profile.link is not None
        self.link = profile.link
        self._profile, self._available = profile, available
        self.best: Choices | None = None
        self.least = (NO_BOUND, 0)
        """The time of the best choices, and the bytes that they move."""
        self._costs = [
            {cost.option: cost for cost in run.menu if may_use(profile, cost.option)}
            for run in profile.runs
        ]
        self.saved: dict[int, OptionCost] = {}
        """Runs that can be saved on the host."""
        self.inputs: dict[int, OptionCost] = {}
        """Runs that can be recomputed from an input on the host."""
        for k, run in enumerate(profile.runs[:-1]):
            on_host, from_host = run.saved_on_host(), run.recomputed_from_host()
            for costs, cost in ((self.saved, on_host), (self.inputs, from_host)):
                if cost is not None and may_use(profile, cost.option):
                    costs[k] = self._costs[k][cost.option] = cost
        self.recomputable = [k for k, costs in enumerate(self._costs) if Option.RECOMPUTE in costs]
        self._shares_outputs = any(run.output_saved for run in profile.runs)
        self._held = [costs[Option.KEEP].backward_held for costs in self._costs]
        self._times = [max(cost.nanoseconds for cost in costs.values()) for costs in self._costs]
        one_time = len({time for time in self._times if time}) == 1
        self._by_price = sorted(
            (k for k, held in enumerate(self._held) if held and self._times[k]),
            key=lambda k: -self._held[k] if one_time else self._times[k] / self._held[k],
        )
        self._whole_runs = one_time
        self.negligible = round(_NEGLIGIBLE * _step_nanoseconds(profile))
        """Time that is not worth looking for a better plan."""
        self._enough = self._bound() + self.negligible

    def moments(self, choices: Choices) -> Moments:
        """The timeline of these choices."""
        if self._shares_outputs:
            return Moments(self._profile, costs_of(self._profile, choices))
        costs = [costs[option] for costs, option in zip(self._costs, choices, strict=True)]
        return Moments(self._profile, costs)

    def offer(self, choices: Choices) -> bool:
        """Take these choices if they fit, and take less time than the best so far, or the same time
        and move less."""
        moments = self.moments(choices)
        moved = sum([transfer.moved_bytes for transfer in moments.schedule.transfers])
        value = moments.extra_nanoseconds, moved
        fits = moments.peak <= self._available and moved <= self.link.host_bytes
        if not fits or value >= self.least:
            return False
        self.best, self.least = choices, value
        return True

    def recompute_time(self, choices: Choices) -> int:
        """The time of recomputes alone."""
        return sum([time for time, o in zip(self._times, choices, strict=True) if o.recomputes])

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
        """Whether no choices can be much better than the best so far."""
        return self.least[0] <= self._enough

    def _bound(self) -> int:
        """The least time of any choices: what exceeds the available bytes when the first backward
        begins must have been moved by then, or is recomputed."""
        runs = self._profile.runs
        first = min([*self.saved, *self.inputs], default=len(runs))
        hidden = sum(run.nanoseconds for run in runs[first + 1 :])
        excess = sum(self._held) + self._profile.head_backward - self._available
        pace = 1e6 / self.link.nanoseconds_to_host(1_000_000) if hidden else 0.0
        left, time, least = excess - hidden * pace, 0.0, float(NO_BOUND)
        for k in self._by_price:
            if left <= 0:
                break
            if pace:
                least = min(least, time + left / pace)
            share = 1.0 if self._whole_runs else min(1.0, left / self._held[k])
            time += self._times[k] * share
            left -= self._held[k]
        if left > 0 and pace:
            time += left / pace
        return int(min(least, time))

    def least_recompute(self, on_host: Sequence[int], freed: int = 0) -> int:
        """The least time of recomputes with these runs on the host, and so many bytes of inputs: so
        much must not be held when the first backward begins."""
        away = set(on_host)
        held = sum(held for k, held in enumerate(self._held) if k not in away)
        excess = held + self._profile.head_backward - self._available - freed
        time = 0.0
        for k in self._by_price:
            if excess <= 0:
                break
            if k not in away:
                share = 1.0 if self._whole_runs else min(1.0, excess / self._held[k])
                time += self._times[k] * share
                excess -= self._held[k]
        return int(time) if excess <= 0 else NO_BOUND

    def polish(self, changes: int) -> None:
        """Change one choice, or two, as long as that is better; so many changes at most."""
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
        """Choices that differ in one run or two, and might be better by their recomputes and by
        what they hold when the backward begins."""
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
