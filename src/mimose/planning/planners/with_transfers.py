"""Plans that use host memory: which runs move, searched around the scan for all others.

A transfer is in flight while other runs compute, so its cost is not local and the scan alone cannot
place it. Here the set of runs that are saved on the host is searched, and the scan solves the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, islice

from mimose.costs import Option, Profile, Schedule
from mimose.planning.planners.candidates import Candidates, Choices
from mimose.planning.planners.pareto import Choice, Menu, cheapest, menus_of
from mimose.planning.planners.strictest import strictest

_QUEUES = (1, 2, 3, 1 << 30)
"""How many copies may be under way or wait at most, in the sequences that are tried."""
_LEAST_SCANS, _SCANS = 9, 420
"""How many scans a search may take: at least so many, and else so many divided by the number of
runs. About 8 ms for 32 different runs, 40 ms for 96."""
_LONG_STEP = 1_000_000_000
"""Nanoseconds of forwards and backwards for which a search may take all of its effort; for a
shorter step it takes its share, so that planning hardly adds to the step."""
_ARRANGEMENTS = 40_000
"""How many sets of saved runs like the best one are looked at, times the square of that number."""
_ASSUMPTIONS = 3
"""How often choices are made anew because bytes come back earlier than was assumed."""
_TIGHTENINGS = 5
"""How often a plan with inputs on the host is made anew because it exceeds what is available."""
_CHANGES = 12_000
"""How many changes of one or two choices are tried in the end, times that square."""


def with_transfers(profile: Profile, available: int, without: Choices | None) -> Choices | None:
    """The cheapest choices found that use host memory; `without`, the cheapest that do not, if they
    take hardly more time. None if nothing fits."""
    if without is not None and not _may_pay(profile, without):
        return without
    search = _Search(profile, available)
    if without is not None:
        search.candidates.offer(without)
    for step in (search.save_on_host, search.move_inputs, search.rearrange, search.polish):
        if not search.candidates.good_enough:
            step()
    return search.candidates.best


def _may_pay(profile: Profile, without: Choices) -> bool:
    """Whether some run alone could move in less time than these choices recompute."""
    runs, link = profile.runs, profile.link
    assert link is not None
    least = sum([run.nanoseconds for run, o in zip(runs, without, strict=True) if o.recomputes])
    after = later = 0
    for k in reversed(range(len(runs))):
        run = runs[k]
        moved = run.saved - run.output_saved
        if run.input_movable and 0 < run.boundary < moved:
            moved = run.boundary
        if moved > 0 and k < len(runs) - 1 and not run.fixed:
            late = max(0, link.nanoseconds_to_host(moved) - after)
            if late + max(0, link.nanoseconds_from_host(moved) - later) < least:
                return True
        after += run.nanoseconds
        later += (run.backward_nanoseconds or run.nanoseconds) + run.nanoseconds
    return False


class _Search:
    """Ways to find better choices."""

    def __init__(self, profile: Profile, available: int) -> None:
        self._profile, self._available = profile, available
        self.candidates = Candidates(profile, available)
        self._menus = menus_of(profile)
        self._effort = min(1.0, self.candidates.step_nanoseconds / _LONG_STEP)
        self._scans_left = max(_LEAST_SCANS, int(self._effort * _SCANS) // len(profile.runs))
        self._ends = list(accumulate(run.nanoseconds for run in profile.runs))

    # Activations on the host

    def save_on_host(self) -> None:
        """Try sequences of runs that are saved on the host, then other sets like the best."""
        best: tuple[list[int], int] | None = None
        for sequence, count in self._beginnings():
            if self._solve(sequence[:count]):
                best = sequence, count
            if self.candidates.good_enough:
                break
        if best is not None:
            self._shorten(*best)

    def _beginnings(self) -> Iterator[tuple[list[int], int]]:
        """Sequences and how many runs of each to take: as many as no one waits for, one more, half
        of them, and all, each set once."""
        sequences = [self._sequence(queue) for queue in _QUEUES]
        counts = [hidden for _, hidden in sequences]
        counts += [hidden + 1 for _, hidden in sequences]
        counts += [hidden // 2 for _, hidden in sequences]
        counts += [len(sequence) for sequence, _ in sequences]
        tried: set[tuple[int, ...]] = {()}
        for (sequence, _), count in zip(sequences * 4, counts, strict=True):
            chosen = tuple(sequence[:count])
            if chosen not in tried:
                tried.add(chosen)
                yield sequence, len(chosen)

    def _sequence(self, queue: int) -> tuple[list[int], int]:
        """Runs to save on the host, each as early as at most so many copies are under way or wait;
        and how many of these copies are over when the forwards are."""
        sequence: list[int] = []
        over: list[int] = []
        room = self.candidates.link.host_bytes
        for k, cost in self.candidates.saved.items():
            end = self._ends[k]
            if (len(over) >= queue and over[-queue] > end) or cost.moved > room:
                continue
            room -= cost.moved
            sequence.append(k)
            begins = max(end, over[-1]) if over else end
            over.append(begins + self.candidates.link.nanoseconds_to_host(cost.moved))
        return sequence, sum(end <= self._ends[-1] for end in over)

    def _shorten(self, sequence: list[int], count: int) -> None:
        """Find the fewest of these runs that reach the same time."""
        too_few, enough = 0, count
        while too_few + 1 < enough:
            middle = (too_few + enough) // 2
            if self._solve(sequence[:middle], as_good=True):
                enough = middle
            else:
                too_few = middle

    def rearrange(self) -> None:
        """Save one more run, or another one instead, as long as that is better."""
        most = int(self._effort * _ARRANGEMENTS) // len(self._menus) ** 2
        for solve in (self._solve, self._solve_with_inputs):
            while any(map(solve, islice(self._arrangements(), most))):
                if self.candidates.good_enough:
                    return

    def _arrangements(self) -> Iterator[Sequence[int]]:
        """Other sets of runs, those like the best one first."""
        on_host = self.candidates.on_host()
        others = [k for k in self.candidates.saved if k not in on_host]
        for at, k in enumerate(on_host):
            for instead in (k + 1, k - 1):
                if instead in others:
                    yield [*on_host[:at], instead, *on_host[at + 1 :]]
        for changes in range(1, 4):
            for changed in combinations(self.candidates.saved, changes):
                yield sorted(set(on_host).symmetric_difference(changed))

    def _solve(self, on_host: Sequence[int], *, as_good: bool = False) -> bool:
        """Find better choices, or equally fast ones that move less, if these runs are on the host.

        When bytes come back depends on which runs are recomputed. At first all others are taken to
        be, so that bytes come back as late as they ever do. If what follows does not fit, only
        those are that it recomputes.
        """
        candidates = self.candidates
        limit = candidates.least[0] + 1 if as_good else self._worth_it
        if not self._scans_left or candidates.least_time.with_moved(on_host) >= limit:
            return False
        recomputed = candidates.recomputable
        for _ in range(_ASSUMPTIONS):
            schedule = candidates.schedule(on_host, recomputed)
            below = limit - schedule.stall_nanoseconds
            found = None
            if below > 0:
                found = self._scan(self._around(schedule), self._available, below)
            if found is None or candidates.recompute_time(found) >= below:
                return False
            if candidates.offer(found):
                return True
            recomputed = [k for k, option in enumerate(found) if option.recomputes]
        return False

    def _scan(self, menus: list[Menu], available: int, below: int) -> Choices | None:
        """The cheapest choices from these menus; None also if the search has taken long enough."""
        if not self._scans_left:
            return None
        self._scans_left -= 1
        return cheapest(menus, self._profile, available, below)

    def _around(self, schedule: Schedule) -> list[Menu]:
        """The menus of all runs while these transfers are made."""
        count = len(self._menus)
        forward, backward = [0] * (count + 1), [0] * (count + 1)
        for run, _, release, prefetch in schedule.transfers:
            cost = self.candidates.saved[run]
            forward[run + 1] += cost.forward_freed
            forward[release] -= cost.forward_freed
            backward[run + 1] += cost.backward_freed
            backward[prefetch + 1] -= cost.backward_freed
        in_flight = zip(self._menus, accumulate(forward), accumulate(backward), strict=False)
        menus = [_raised(menu, *more) if any(more) else menu for menu, *more in in_flight]
        for run, *_ in schedule.transfers:
            cost, (forward_need, backward_need, *_) = self.candidates.saved[run], menus[run][0]
            left = cost.forward_held - cost.forward_freed, cost.backward_held - cost.backward_freed
            menus[run] = [Choice(forward_need, backward_need, *left, 0, Option.SAVE_ON_HOST)]
        return menus

    # Inputs on the host

    def move_inputs(self) -> None:
        """Let recomputed runs move their inputs, if that saves a recompute."""
        candidates = self.candidates
        if not candidates.inputs:
            return
        sequences = (self._sequence(queue) for queue in _QUEUES)
        sets = [candidates.on_host(), *(runs[:hidden] for runs, hidden in sequences), []]
        for on_host in dict.fromkeys(map(tuple, sets)):
            if self._solve_with_inputs(on_host):
                break
        if candidates.best is None:
            candidates.offer(strictest(self._profile, self._available).choices)

    def _solve_with_inputs(self, on_host: Sequence[int]) -> bool:
        """Find better choices if these runs are on the host, and inputs of recomputed runs."""
        before = self.candidates.least
        if found := self._from_inputs(on_host):
            self._move_fewer(found)
        return self.candidates.least < before

    def _from_inputs(self, on_host: Sequence[int]) -> Choices | None:
        """Choices in which recomputed runs may have their inputs on the host.

        In the scan an input is away from the end of its forward to its backward. What the timeline
        then has in excess is taken from the available bytes.
        """
        inputs = {k: cost for k, cost in self.candidates.inputs.items() if k not in on_host}
        freed = sum(cost.moved for cost in inputs.values())
        least = self.candidates.least_time.with_moved(on_host, freed)
        if not self._scans_left or least >= self._worth_it:
            return None
        for recomputed in (self.candidates.recomputable, self.candidates.recomputed(), ()):
            menus = self._around(self.candidates.schedule(on_host, recomputed))
            for k, cost in inputs.items():
                again, freed = menus[k][-1], -cost.moved
                moved = Choice(*again[:2], freed, freed, again.time, cost.option)
                menus[k] = [*menus[k], moved]
            if found := self._tightened(menus):
                return found
        return None

    def _tightened(self, menus: list[Menu]) -> Choices | None:
        """Choices from these menus that fit; made with fewer bytes, as long as they need more."""
        available = self._available
        for _ in range(_TIGHTENINGS):
            found = self._scan(menus, available, self._worth_it)
            if found is None or self.candidates.offer(found):
                return found
            excess = self.candidates.moments(found).peak - self._available
            if excess <= 0:  # it fits, and the device waits too long
                return found
            available -= excess // 2 + 1
        return None

    @property
    def _worth_it(self) -> int:
        """Choices that take less time than this are worth finding."""
        return self.candidates.least[0] - self.candidates.negligible

    def _move_fewer(self, choices: Choices) -> None:
        """Leave as many inputs on the device as fit there, the last ones first."""
        moving = [k for k, option in enumerate(choices) if option is Option.RECOMPUTE_FROM_HOST]
        too_few, enough = -1, len(moving)
        while too_few + 1 < enough:
            middle = (too_few + enough) // 2
            fewer = list(choices)
            for k in moving[middle:]:
                fewer[k] = Option.RECOMPUTE
            self.candidates.offer(tuple(fewer))
            if self.candidates.moments(tuple(fewer)).peak <= self._available:
                enough = middle
            else:
                too_few = middle

    def polish(self) -> None:
        """Change one choice, or two, as long as that is better."""
        self.candidates.polish(int(self._effort * _CHANGES) // len(self._menus) ** 2)


def _raised(menu: Menu, forward: int, backward: int) -> Menu:
    """The menu of a run while so many bytes more are in use."""
    return [Choice(c[0] + forward, c[1] + backward, *c[2:]) for c in menu]
