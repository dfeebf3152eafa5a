"""Lower bounds on the time that any choices take."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mimose.costs import OptionCost, Profile
from mimose.planning.planners.pareto import NO_BOUND


class LeastTime:
    """What a plan takes at least, from the bytes that are in use when the first backward begins.

    What all runs would hold then, beyond the available bytes, was moved by that time or is
    recomputed. Those runs are recomputed first that take the least time for the bytes they hold.
    """

    def __init__(self, profile: Profile, available: int, again: dict[int, OptionCost]) -> None:
        self._profile = profile
        self._held = [run.menu[0].backward_held for run in profile.runs]
        self._excess = sum(self._held) + profile.head_backward - available
        self._times = {k: cost.nanoseconds for k, cost in again.items() if self._held[k]}
        self._whole = len(set(self._times.values())) == 1
        """Whether all recomputes take the same time: then their number can be counted."""
        self._by_price = sorted(
            self._times,
            key=lambda k: -self._held[k] if self._whole else self._times[k] / self._held[k],
        )

    def overall(self, first_moved: int) -> int:
        """Of any choices in which no run before this one moves anything."""
        link = self._profile.link
        assert link is not None
        hidden = sum(run.nanoseconds for run in self._profile.runs[first_moved + 1 :])
        least = NO_BOUND
        for time, left in self._recomputed(self._excess - link.bytes_to_host(hidden), ()):
            least = min(least, int(time) + link.nanoseconds_to_host(max(0, left)))
        return least

    def with_moved(self, on_host: Collection[int], inputs_bytes: int = 0) -> int:
        """Of recomputes, with these runs saved on the host and so many bytes of inputs there."""
        excess = self._excess - inputs_bytes - sum(self._held[k] for k in on_host)
        for time, left in self._recomputed(excess, on_host):
            if left <= 0:
                return int(time)
        return NO_BOUND

    def _recomputed(self, excess: int, on_host: Collection[int]) -> Iterator[tuple[float, int]]:
        """The time for recomputing no run, one, two, …, and the excess that is left."""
        time = 0.0
        yield time, excess
        for k in self._by_price:
            if excess <= 0:
                break
            if k not in on_host:
                share = 1.0 if self._whole else min(1.0, excess / self._held[k])
                time += self._times[k] * share
                excess -= self._held[k]
                yield time, excess
