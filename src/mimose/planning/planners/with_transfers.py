"""Search for plans that use host memory.

A transfer takes place while other runs compute, so its cost depends on them, and the scan of
`pareto.py` alone cannot place it. Instead, the set of runs that are saved on the host is searched.
For each set, the scan finds the best options of all other runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, islice

from mimose.costs import Option, Profile, Schedule
from mimose.planning.planners.candidates import Candidates, Choices
from mimose.planning.planners.pareto import Choice, Menu, cheapest, menus_of
from mimose.planning.planners.strictest import strictest

_QUEUES = (1, 2, 3, 1 << 30)
"""The greatest lengths of the queue of copies in the sequences of runs that are tried first."""
_LEAST_SCANS, _SCANS = 9, 12_000
"""The number of scans of a search: `_SCANS` divided by the square of the number of runs, but
`_LEAST_SCANS` at least. They take up to 10 ms for 32 different runs, 30 ms for 96."""
_MANY_SCANS = 16
"""From this number on, a search can try sets of which one alone takes several scans."""
_LONG_STEP = 1_000_000_000
"""Nanoseconds of forwards and backwards for which a search may use its full effort. For a shorter
step the effort is proportionally smaller, so that planning adds little to the step."""
_ARRANGEMENTS = 40_000
"""The number of sets of saved runs that `rearrange` tries, times the number of runs squared."""
_ASSUMPTIONS = 3
"""The most times to solve a set again because bytes come back earlier than assumed."""
_TIGHTENINGS = 5
"""The most times to solve for fewer bytes because inputs on the host exceed the available ones."""
_CHANGES = 12_000
"""The number of changes that `polish` tries, times the number of runs squared."""


def with_transfers(profile: Profile, available: int, without: Choices | None) -> Choices | None:
    """The cheapest choices found that may use host memory; None if nothing fits.

    `without` are the cheapest choices that do not use it; they are returned if they take hardly
    more time.
    """
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
    """Whether any run could move with a shorter stall than these choices spend on recomputes."""
    runs, link = profile.runs, profile.link
    assert link is not None
    recomputes = sum([r.nanoseconds for r, o in zip(runs, without, strict=True) if o.recomputes])
    forwards_after = backwards_after = 0  # time of later runs, which can hide the copies
    for k in reversed(range(len(runs))):
        run = runs[k]
        moved = run.saved - run.output_saved
        if run.input_movable and 0 < run.boundary < moved:
            moved = run.boundary
        if moved > 0 and k < len(runs) - 1 and not run.fixed:
            stall = max(0, link.nanoseconds_to_host(moved) - forwards_after)
            stall += max(0, link.nanoseconds_from_host(moved) - backwards_after)
            if stall < recomputes:
                return True
        forwards_after += run.nanoseconds
        backwards_after += (run.backward_nanoseconds or run.nanoseconds) + run.nanoseconds
    return False


class _Search:
    """The steps of the search. They share a limit on the number of scans."""

    def __init__(self, profile: Profile, available: int) -> None:
        self._profile, self._available = profile, available
        self.candidates = Candidates(profile, available)
        self._menus = menus_of(profile)
        self._effort = min(1.0, self.candidates.step_nanoseconds / _LONG_STEP)
        scans = self._effort * _SCANS / max(1, len(profile.runs)) ** 2
        self._scans_left = max(_LEAST_SCANS, int(scans))
        self._thorough = self._scans_left >= _MANY_SCANS
        self._forward_ends = list(accumulate(run.nanoseconds for run in profile.runs))

    # Activations on the host

    def save_on_host(self) -> None:
        """Try to save sequences of runs on the host, then fewer runs of the best sequence."""
        best: tuple[list[int], int] | None = None
        for sequence, count in self._prefixes():
            if self._solve(sequence[:count]):
                best = sequence, count
            if self.candidates.good_enough:
                break
        if best is not None:
            self._shorten(*best)

    def _prefixes(self) -> Iterator[tuple[list[int], int]]:
        """Sequences, and the number of runs of each to take; each resulting set once.

        The numbers are: as many as the forwards hide, one more, half as many, and all.
        """
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
        """Runs to save on the host, and the number of them whose copies the forwards hide.

        A run is taken if, when its forward ends, fewer than `queue` copies are running or waiting.
        """
        sequence: list[int] = []
        copy_ends: list[int] = []
        room = self.candidates.link.host_bytes
        for k, cost in self.candidates.saved.items():
            forward_end = self._forward_ends[k]
            queue_full = len(copy_ends) >= queue and copy_ends[-queue] > forward_end
            if queue_full or cost.moved > room:
                continue
            room -= cost.moved
            sequence.append(k)
            begins = max(forward_end, copy_ends[-1]) if copy_ends else forward_end
            copy_ends.append(begins + self.candidates.link.nanoseconds_to_host(cost.moved))
        return sequence, sum(end <= self._forward_ends[-1] for end in copy_ends)

    def _shorten(self, sequence: list[int], count: int) -> None:
        """Find the shortest prefix of at most `count` runs that reaches the same time."""
        too_few, enough = 0, count  # bisection
        while too_few + 1 < enough:
            middle = (too_few + enough) // 2
            if self._solve(sequence[:middle], as_good=True):
                enough = middle
            else:
                too_few = middle

    def rearrange(self) -> None:
        """Change which runs are saved on the host, as long as that is better."""
        most = int(self._effort * _ARRANGEMENTS) // len(self._menus) ** 2
        first = () if self._thorough else (self._solve,)
        for solve in (*first, self._solve_with_inputs):
            while any(map(solve, islice(self._arrangements(), most))):
                if self.candidates.good_enough:
                    return

    def _arrangements(self) -> Iterator[Sequence[int]]:
        """Sets of runs that are similar to the best set, the most similar first."""
        on_host = self.candidates.on_host()
        others = [k for k in self.candidates.saved if k not in on_host]
        for at, k in enumerate(on_host):
            for neighbour in (k + 1, k - 1):
                if neighbour in others:
                    yield [*on_host[:at], neighbour, *on_host[at + 1 :]]
        for changes in range(1, 4):
            for changed in combinations(self.candidates.saved, changes):
                yield sorted(set(on_host).symmetric_difference(changed))

    def _solve(self, on_host: Sequence[int], *, as_good: bool = False) -> bool:
        """Find better choices with these runs on the host. Returns whether any were found.

        With `as_good`, equally fast choices that move fewer bytes count as better. When bytes come
        back depends on which runs are recomputed. At first all other runs are assumed to be, so
        that bytes come back as late as possible. If the resulting choices do not fit, the runs that
        they recompute are assumed instead.
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
                found = self._scan(self._menus_around(schedule), self._available, below)
            if found is None or candidates.recompute_time(found) >= below:
                return False
            if candidates.offer(found):
                return True
            recomputed = [k for k, option in enumerate(found) if option.recomputes]
        return False

    def _scan(self, menus: list[Menu], available: int, below: int) -> Choices | None:
        """The cheapest choices from these menus; None if there are none or no scans are left."""
        if not self._scans_left:
            return None
        self._scans_left -= 1
        return cheapest(menus, self._profile, available, below)

    def _menus_around(self, schedule: Schedule) -> list[Menu]:
        """The menus of all runs, given these transfers: bytes in flight raise the needs of runs."""
        count = len(self._menus)
        forward, backward = [0] * (count + 1), [0] * (count + 1)
        for run, _, release, prefetch in schedule.transfers:
            cost = self.candidates.saved[run]
            forward[run + 1] += cost.forward_freed  # from its own forward to its release
            forward[release] -= cost.forward_freed
            backward[run + 1] += cost.backward_freed  # from its prefetch to its own backward
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
        """Try to move the inputs of recomputed runs, if that saves a recompute."""
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
        """Find better choices with these runs on the host, and inputs of recomputed runs."""
        before = self.candidates.least
        if found := self._choices_with_inputs(on_host):
            self._move_fewer(found)
        return self.candidates.least < before

    def _choices_with_inputs(self, on_host: Sequence[int]) -> Choices | None:
        """Choices in which recomputed runs may have their inputs on the host.

        The scan assumes that an input is on the host from the end of its forward to its backward.
        If the exact timeline exceeds the available bytes, `_tightened` scans again with fewer.
        """
        inputs = {k: cost for k, cost in self.candidates.inputs.items() if k not in on_host}
        freed = sum(cost.moved for cost in inputs.values())
        least = self.candidates.least_time.with_moved(on_host, freed)
        if not self._scans_left or least >= self._worth_it:
            return None
        for recomputed in (self.candidates.recomputable, self.candidates.recomputed(), ()):
            menus = self._menus_around(self.candidates.schedule(on_host, recomputed))
            for k, cost in inputs.items():
                recompute, held = menus[k][-1], -cost.moved
                moved = recompute._replace(
                    forward_held=held, backward_held=held, option=cost.option
                )
                menus[k] = [*menus[k], moved]
            if found := self._tightened(menus):
                return found
        return None

    def _tightened(self, menus: list[Menu]) -> Choices | None:
        """Choices from these menus that are better than the best so far.

        If they do not fit, the next scan has fewer bytes. If they fit, but the device waits too
        long for copies, the last of these inputs stays on the device in a thorough search.
        """
        available = self._available
        for _ in range(_TIGHTENINGS):
            found = self._scan(menus, available, self._worth_it)
            if found is None or self.candidates.offer(found):
                return found
            excess = self.candidates.moments(found).peak - self._available
            if excess > 0:
                available -= excess // 2 + 1
                continue
            moving = [k for k, option in enumerate(found) if option is Option.RECOMPUTE_FROM_HOST]
            if not (moving and self._thorough):
                return found
            last = menus[moving[-1]]
            menus[moving[-1]] = [c for c in last if c.option is not Option.RECOMPUTE_FROM_HOST]
        return None

    @property
    def _worth_it(self) -> int:
        """Choices must take less time than this to be worth finding."""
        return self.candidates.least[0] - self.candidates.negligible

    def _move_fewer(self, choices: Choices) -> None:
        """Leave as many inputs on the device as fit, those of the last runs first."""
        moving = [k for k, option in enumerate(choices) if option is Option.RECOMPUTE_FROM_HOST]
        too_few, enough = -1, len(moving)  # bisection
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
        """Change one choice or two as long as that is better."""
        self.candidates.polish(int(self._effort * _CHANGES) // len(self._menus) ** 2)


def _raised(menu: Menu, forward: int, backward: int) -> Menu:
    """The menu of a run while this many more bytes are in use."""
    return [Choice(c[0] + forward, c[1] + backward, *c[2:]) for c in menu]
