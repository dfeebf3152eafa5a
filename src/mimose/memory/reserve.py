"""The part of the budget that plans leave free, learned while training."""

from __future__ import annotations

from collections import deque
from statistics import median

from mimose.memory.meters import Meter


def reserve_for(budget_bytes: int, meter: Meter) -> Reserve:
    """The reserve that suits a device's allocator."""
    if meter.fragments:
        return FragmentReserve(budget_bytes, meter.hole_bytes)
    if meter.hole_bytes:
        return PageReserve(budget_bytes, meter.hole_bytes)
    return Reserve(budget_bytes)


class Reserve:
    """What the allocator needs beside the bytes in use: holes between tensors, workspaces.

    How much cannot be known in advance. It is 3 % of the budget, or the holes that the allocator's
    pages may leave, where these are more (but not over 5 %). When memory has run out, plans were
    too tight: it grows by 1 %, up to a quarter. Without a sign over many steps near the limit it
    shrinks again.
    """

    _FIRST, _AFTER_FAILURE, _GREATEST, _PATIENCE = 0.03, 0.01, 0.25, 50

    def __init__(self, budget_bytes: int, hole_bytes: int = 0) -> None:
        self._budget = budget_bytes
        holes = min(hole_bytes, 0.05 * budget_bytes)
        self.least = int(max(self._FIRST * budget_bytes, holes))
        """What it never falls below."""
        self.bytes = self._asked = self.least
        self._quiet_steps = 0

    def near_limit(self, peak_bytes: int) -> bool:
        """Whether a step's peak is high enough to learn from."""
        return peak_bytes >= 0.98 * (self._budget - self.bytes)

    def wants_look(self, peak_bytes: int) -> bool:
        """Whether what is lost between tensors should be looked at in a step that is to peak there.

        That takes about a millisecond.
        """
        return False

    def learn_lost(self, number_of_bytes: int) -> bool:
        """After a forward so much lay free between tensors, and was of no use to others.

        Whether cached memory should be given back before the next step near the limit.
        """
        return False

    def learn_unusable(self, number_of_bytes: int) -> None:
        """An observed step made the allocator hold so much more than was ever in use."""

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        """A step peaked at `peak_bytes` in use, and at its end the allocator held `held_bytes`.

        It may have held more than ever, and had to give cached memory back `retries` times.
        """
        if self.near_limit(peak_bytes):
            self._stayed_quiet()

    def ran_out(self) -> None:
        """The allocator has run out of memory in a step: the plans left too little."""
        self._ask(self.bytes + int(self._AFTER_FAILURE * self._budget))

    def _ask(self, number: int) -> None:
        greatest = int(self._GREATEST * self._budget)
        self._asked, self._quiet_steps = min(max(number, self.least), greatest), 0
        self._settle()

    def _settle(self) -> None:
        self.bytes = self._asked

    def _stayed_quiet(self) -> None:
        self._quiet_steps += 1
        if self._quiet_steps >= self._PATIENCE:
            self._ask(int(0.9 * self._asked))


class FragmentReserve(Reserve):
    """For an allocator that leaves fragments, and cannot tell what is lost in them.

    What it holds beyond what is in use counts, and every time that it had to give memory back.
    On an H200 it came to 20 to 34 % on five of six models; at 15 % one of them ran out of memory.
    """

    _FIRST, _AFTER_FAILURE, _GREATEST = 0.20, 0.03, 0.45
    _A_RETRY = 0.005

    def learn_unusable(self, number_of_bytes: int) -> None:
        if number_of_bytes > self.bytes:
            self._ask(number_of_bytes)

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        if retries:
            self._ask(self.bytes + int(retries * self._A_RETRY * self._budget))
        elif not self.near_limit(peak_bytes):
            return
        elif grew and held_bytes - peak_bytes > self.bytes:
            self._ask(held_bytes - peak_bytes)
        else:
            self._stayed_quiet()


class PageReserve(Reserve):
    """For an allocator that gives back whole pages alone: a part of every hole is lost.

    How much depends on how well tensors of one kind fit into the places of others, so on the model
    and on the size of the batch. It is looked at after the forwards of the first steps near the
    limit; until enough have been seen, 8 % of the budget is left free. Then it is two and a half
    times what forwards lose as a rule, since a backward leaves holes of its own, or nearly one and
    a half times the most that one has lost.

    That the allocator had to give cached memory back near the limit costs next to nothing, but it
    tells: all that could be given back was, so what is held beyond the step's peak is lost there.
    The reserve stays 30 % above that. After it, and as long as more than the least is left free,
    what is lost is looked at again now and then. The reserve grows up to 8 %; only running out of
    memory makes it grow further.
    """

    _MOST = 0.08
    _TIMES_USUAL, _TIMES_MOST, _TIMES_LOST_AT_PEAK = 2.5, 1.4, 1.3
    _LOOKS, _PAUSE, _UNTIDY_PAUSE = 8, 32, 512

    def __init__(self, budget_bytes: int, hole_bytes: int = 0) -> None:
        super().__init__(budget_bytes, hole_bytes)
        self._most = max(self.least, int(self._MOST * budget_bytes))
        self._lost: deque[int] = deque(maxlen=self._LOOKS)
        self._until_look = self._until_tidy = 0
        self._retried = False
        self._settle()

    def wants_look(self, peak_bytes: int) -> bool:
        if not self.near_limit(peak_bytes):
            return False
        if len(self._lost) < self._LOOKS:
            return True
        return self._until_look <= 0 and (self._retried or self.bytes > self.least)

    def learn_lost(self, number_of_bytes: int) -> bool:
        """If more is lost than is reserved for, the reason may be how often parts of what is cached
        were given back in mid-step: then all of it is, once in a long while, to look again."""
        young = len(self._lost) < self._LOOKS
        too_much = self._TIMES_USUAL * number_of_bytes > self.bytes
        if too_much and not young and self._until_tidy <= 0:
            self._until_tidy, self._retried, self._until_look = self._UNTIDY_PAUSE, True, 0
            return True
        self._retried, self._until_look = False, self._PAUSE
        self._lost.append(number_of_bytes)
        self._settle()
        return False

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        self._retried |= bool(retries)
        if not self.near_limit(peak_bytes):
            return
        self._until_look -= 1
        self._until_tidy -= 1
        needed = int(self._TIMES_LOST_AT_PEAK * (held_bytes - peak_bytes)) if retries else 0
        if needed > self.bytes:
            self._ask(needed)
        else:
            self._stayed_quiet()

    def ran_out(self) -> None:
        more = self.bytes + int(self._AFTER_FAILURE * self._budget)
        self._most = max(self._most, min(more, int(self._GREATEST * self._budget)))
        super().ran_out()

    @property
    def _needed(self) -> int:
        """What a step's peak may lose, going by what forwards have lost."""
        if not self._lost:
            return 0
        usual, most = median(self._lost), max(self._lost)
        return int(max(self._TIMES_USUAL * usual, self._TIMES_MOST * most))

    def _settle(self) -> None:
        few = len(self._lost) < self._LOOKS
        self.bytes = self._most if few else min(max(self._asked, self._needed), self._most)
