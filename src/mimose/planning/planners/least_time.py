"""Lower bounds on the extra time of any plan that uses host memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mimose.costs import OptionCost, Profile
from mimose.planning.planners.pareto import NO_BOUND


class LeastTime:
    """Lower bounds from the memory in use when the first backward begins.

    The excess is the bytes that all runs would hold then if kept, beyond the available bytes. It
    must have been moved by then, or belong to recomputed runs. The bounds recompute the runs with
    the least time per held byte first.
    """

    def __init__(self, profile: Profile, available: int, recomputes: dict[int, OptionCost]) -> None:
        self._profile = profile
        self._held = [run.menu[0].backward_held for run in profile.runs]
        self._excess = sum(self._held) + profile.head_backward - available
        self._times = {k: cost.nanoseconds for k, cost in recomputes.items() if self._held[k]}
        self._equal_times = len(set(self._times.values())) == 1
        """Whether all recomputes take the same time. The bound then counts whole recomputes."""
        self._by_time_per_byte = sorted(
            self._times,
            key=lambda k: -self._held[k] if self._equal_times else self._times[k] / self._held[k],
        )

    def overall(self, first_moved: int) -> int:
        """The least time of any choices in which no run before `first_moved` moves bytes."""
        link = self._profile.link
        assert link is not None
        forwards = sum(run.nanoseconds for run in self._profile.runs[first_moved + 1 :])
        least = NO_BOUND
        for time, left in self._after_recomputes(self._excess - link.bytes_to_host(forwards), ()):
            least = min(least, int(time) + link.nanoseconds_to_host(max(0, left)))
        return least

    def with_moved(self, on_host: Collection[int], inputs_bytes: int = 0) -> int:
        """The least time of recomputes with these runs and `inputs_bytes` of inputs on the host."""
        excess = self._excess - inputs_bytes - sum(self._held[k] for k in on_host)
        for time, left in self._after_recomputes(excess, on_host):
            if left <= 0:
                return int(time)
        return NO_BOUND

    def _after_recomputes(
        self, excess: int, on_host: Collection[int]
    ) -> Iterator[tuple[float, int]]:
        """The time and the excess left after recomputing no run, one, two, …"""
        time = 0.0
        yield time, excess
        for k in self._by_time_per_byte:
            if excess <= 0:
                break
            if k not in on_host:
                share = 1.0 if self._equal_times else min(1.0, excess / self._held[k])
                time += self._times[k] * share
                excess -= self._held[k]
                yield time, excess
