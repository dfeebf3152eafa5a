"""The part of the budget that plans leave free. Its size is learned while training."""

from __future__ import annotations

from collections import deque
from statistics import median

from mimose.memory.meters import Meter


def reserve_for(budget_bytes: int, meter: Meter) -> Reserve:
    """The kind of reserve that suits a device's allocator."""
    if meter.fragments:
        return FragmentReserve(budget_bytes, meter.hole_bytes)
    if meter.hole_bytes:
        return PageReserve(budget_bytes, meter.hole_bytes)
    return Reserve(budget_bytes)


class Reserve:
    """What the allocator needs beyond the bytes in use: gaps between tensors, workspaces.

    This cannot be known in advance. The reserve starts at 3 % of the budget, or at the gaps that
    the allocator's pages may leave if these are larger (at most 5 %). Each out-of-memory adds 1 %,
    up to a quarter of the budget. After 50 quiet steps near the limit it shrinks by a tenth.
    """

    _FIRST, _AFTER_FAILURE, _GREATEST, _QUIET_STEPS = 0.03, 0.01, 0.25, 50

    def __init__(self, budget_bytes: int, hole_bytes: int = 0) -> None:
        self._budget = budget_bytes
        holes = min(hole_bytes, 0.05 * budget_bytes)
        self.minimum_bytes = int(max(self._FIRST * budget_bytes, holes))
        self.bytes = self._requested = self.minimum_bytes
        self._quiet_steps = 0

    def near_limit(self, peak_bytes: int) -> bool:
        """Whether a step's peak is high enough to learn from."""
        return peak_bytes >= 0.98 * (self._budget - self.bytes)

    def should_measure_lost(self, peak_bytes: int) -> bool:
        """Whether to measure `Meter.lost_bytes` in a step with this predicted peak.

        The measurement takes about a millisecond.
        """
        return False

    def learn_lost(self, lost_bytes: int) -> bool:
        """Learn from `Meter.lost_bytes` after a forward.

        Returns whether to empty the cache before the next step near the limit.
        """
        return False

    def learn_unusable(self, unusable_bytes: int) -> None:
        """Learn how much more than it used the allocator reserved in an observed step."""

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        """Learn from a planned step.

        `peak_bytes` were in use at its peak; at its end the allocator held `held_bytes`. `grew` is
        whether it held more than ever before. It had to free cached memory `retries` times.
        """
        if self.near_limit(peak_bytes):
            self._count_quiet_step()

    def ran_out(self) -> None:
        """Grow after an out-of-memory: plans left too little free."""
        self._request(self.bytes + int(self._AFTER_FAILURE * self._budget))

    def _request(self, number_of_bytes: int) -> None:
        greatest = int(self._GREATEST * self._budget)
        self._requested = min(max(number_of_bytes, self.minimum_bytes), greatest)
        self._quiet_steps = 0
        self._update_bytes()

    def _update_bytes(self) -> None:
        self.bytes = self._requested

    def _count_quiet_step(self) -> None:
        self._quiet_steps += 1
        if self._quiet_steps >= self._QUIET_STEPS:
            self._request(int(0.9 * self._requested))


class FragmentReserve(Reserve):
    """For an allocator that fragments, and cannot report how much memory that loses.

    It learns from what the allocator holds beyond the bytes in use, and from every retry. On an
    H200 it came to 20 to 34 % on five of six models; at 15 % one of them ran out of memory.
    """

    _FIRST, _AFTER_FAILURE, _GREATEST = 0.20, 0.03, 0.45
    _PER_RETRY = 0.005

    def learn_unusable(self, unusable_bytes: int) -> None:
        if unusable_bytes > self.bytes:
            self._request(unusable_bytes)

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        if retries:
            self._request(self.bytes + int(retries * self._PER_RETRY * self._budget))
        elif not self.near_limit(peak_bytes):
            return
        elif grew and held_bytes - peak_bytes > self.bytes:
            self._request(held_bytes - peak_bytes)
        else:
            self._count_quiet_step()


class PageReserve(Reserve):
    """For an allocator with expandable segments, which frees whole pages only.

    The free memory in partly filled pages is lost. Its amount depends on the model and on the size
    of the batch. It is measured after the forwards of the first eight steps near the limit; until
    then the reserve is 8 % of the budget. Afterwards it is 2.5 times the median measurement, since
    the backward leaves gaps of its own, or 1.4 times the largest if that is more.

    A retry near the limit costs almost no time, but it is informative: the allocator freed all it
    could, so whatever it holds beyond the step's peak is lost. The reserve stays 30 % above that.
    After a retry, and while the reserve is above its minimum, the loss is measured again every 32
    steps. The reserve grows up to 8 %, and further only after an out-of-memory.
    """

    _MOST = 0.08
    _TIMES_MEDIAN, _TIMES_LARGEST, _TIMES_LOST_AT_PEAK = 2.5, 1.4, 1.3
    _MEASUREMENTS, _STEPS_BETWEEN, _STEPS_BETWEEN_EMPTYING = 8, 32, 512

    def __init__(self, budget_bytes: int, hole_bytes: int = 0) -> None:
        super().__init__(budget_bytes, hole_bytes)
        self._most = max(self.minimum_bytes, int(self._MOST * budget_bytes))
        self._lost: deque[int] = deque(maxlen=self._MEASUREMENTS)
        self._until_measuring = self._until_emptying = 0
        self._retried = False
        self._update_bytes()

    @property
    def _is_new(self) -> bool:
        return len(self._lost) < self._MEASUREMENTS

    def should_measure_lost(self, peak_bytes: int) -> bool:
        if not self.near_limit(peak_bytes):
            return False
        above_minimum = self.bytes > self.minimum_bytes
        return self._is_new or (self._until_measuring <= 0 and (self._retried or above_minimum))

    def learn_lost(self, lost_bytes: int) -> bool:
        """Learn from a measurement, or ask to empty the cache and measure again.

        Many partial frees of the cache in mid-step can make the loss exceed the reserve. So an
        excessive loss is measured again after the cache was emptied, at most every 512 steps.
        """
        too_much = self._TIMES_MEDIAN * lost_bytes > self.bytes
        if too_much and not self._is_new and self._until_emptying <= 0:
            self._until_emptying, self._until_measuring = self._STEPS_BETWEEN_EMPTYING, 0
            self._retried = True
            return True
        self._retried, self._until_measuring = False, self._STEPS_BETWEEN
        self._lost.append(lost_bytes)
        self._update_bytes()
        return False

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        self._retried |= bool(retries)
        if not self.near_limit(peak_bytes):
            return
        self._until_measuring -= 1
        self._until_emptying -= 1
        needed = int(self._TIMES_LOST_AT_PEAK * (held_bytes - peak_bytes)) if retries else 0
        if needed > self.bytes:
            self._request(needed)
        else:
            self._count_quiet_step()

    def ran_out(self) -> None:
        more = self.bytes + int(self._AFTER_FAILURE * self._budget)
        self._most = max(self._most, min(more, int(self._GREATEST * self._budget)))
        super().ran_out()

    def _update_bytes(self) -> None:
        if self._is_new:
            self.bytes = self._most
            return
        needed = self._TIMES_MEDIAN * median(self._lost), self._TIMES_LARGEST * max(self._lost)
        self.bytes = min(max(self._requested, int(max(needed))), self._most)
