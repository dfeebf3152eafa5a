"""The part of the budget that plans leave free, learned while training."""

from __future__ import annotations

from collections import deque
from statistics import median


class Reserve:
    """What the allocator needs beside the bytes in use: holes between tensors, workspaces.

    How much cannot be known in advance. The reserve starts at 3 % of the budget, or at the holes
    that the allocator's pages may leave, where these are more (but not over 5 %). Evidence is

    - what lay lost between tensors after some forwards: at a step's peak it may be two and a half
      times as much, since a backward leaves holes of its own;
    - that the allocator had to give cached memory back near the limit: that costs next to nothing,
      but it warns, as far as what is lost can be the reason;
    - that memory ran out: plans were too tight.

    An allocator that leaves fragments cannot tell what is lost: what it holds beyond what is in use
    counts instead, and every time that it gave memory back, twice as much. Without a sign over many
    steps near the limit the reserve shrinks to what is needed for all that is known. It may grow to
    a quarter of the budget where there are fragments, else to 8 %; only running out of memory makes
    it grow further.
    """

    _FIRST, _PATIENCE, _A_RETRY = 0.03, 50, 0.0025
    _AT_PEAK, _WARNED = 2.5, 1.25
    _EARLY_LOOKS, _LOOKS, _PAUSE = 4, 5, 32

    def __init__(self, budget_bytes: int, *, fragments: bool = False, hole_bytes: int = 0) -> None:
        self._budget = budget_bytes
        self._least = int(min(max(self._FIRST * budget_bytes, hole_bytes), 0.05 * budget_bytes))
        self._most = budget_bytes // 4 if fragments else max(self._least, int(0.08 * budget_bytes))
        self._most_by_growth = self._most if fragments else self._least
        self._fragments = fragments
        self.bytes = self._asked = self._least
        self._quiet_steps = 0
        self._lost_early: list[int] = []
        self._lost: deque[int] = deque(maxlen=self._LOOKS)
        self._until_look = 0
        self._retried = self._tidied = False

    def near_limit(self, peak_bytes: int) -> bool:
        """Whether a step's peak was high enough to learn from."""
        return peak_bytes >= 0.98 * (self._budget - self.bytes)

    def wants_look(self, peak_bytes: int | None) -> bool:
        """Whether what is lost should be looked at in a step that is to peak there, or is observed.

        It takes about a millisecond: at the beginning, then only where something has changed.
        """
        if peak_bytes is None:
            return len(self._lost_early) < self._EARLY_LOOKS
        if not self.near_limit(peak_bytes):
            return False
        return len(self._lost) < self._LOOKS or (self._retried and self._until_look <= 0)

    def learn_lost_early(self, number_of_bytes: int) -> None:
        """As `learn_lost`, in an observed step: that counts until planned steps have been seen."""
        self._lost_early.append(number_of_bytes)
        self._settle()

    def learn_lost(self, number_of_bytes: int) -> bool:
        """After a forward so much lay free between tensors, and was of no use to others.

        Whether cached memory should be given back before the next such step: if more is lost than
        is reserved for, the reason may be how often parts of it were given back in mid-step.
        """
        if not self._tidied and self._AT_PEAK * number_of_bytes > self.bytes:
            self._tidied, self._retried, self._until_look = True, True, 0
            return True
        self._tidied, self._retried, self._until_look = False, False, self._PAUSE
        self._lost.append(number_of_bytes)
        self._settle()
        return False

    def learn_unusable(self, number_of_bytes: int) -> None:
        """An observed step made the allocator hold so much more than was ever in use.

        That counts where nobody can look at what is lost, or nobody has.
        """
        if number_of_bytes > self.bytes and not (self._lost or self._lost_early):
            self._ask(number_of_bytes)

    def learn(self, *, peak_bytes: int, held_bytes: int, grew: bool, retries: int) -> None:
        """A step peaked at `peak_bytes` in use while the allocator held `held_bytes`."""
        near = self.near_limit(peak_bytes)
        self._retried |= bool(retries)
        self._until_look -= near
        if retries and (near or self._fragments) and self._may_be_why:
            share = retries * self._A_RETRY * (2 if self._fragments else 1)
            self._ask(self.bytes + int(share * self._budget))
        elif not near:
            return
        elif grew and held_bytes - peak_bytes > self.bytes:
            self._ask(max(self._asked, min(held_bytes - peak_bytes, self._most_by_growth)))
        else:
            self._quiet_steps += 1
            if self._quiet_steps >= self._PATIENCE:
                self._ask(int(0.9 * self._asked))

    def ran_out(self) -> None:
        """The allocator has run out of memory in a step: the plans left too little."""
        more = self.bytes + self._budget // 100
        self._most = min(max(self._most, more), self._budget // 4)
        self._ask(more)

    @property
    def _needed(self) -> int:
        """What a step's peak may lose, going by what forwards have lost."""
        seen = self._lost or self._lost_early
        return int(self._AT_PEAK * median(seen)) if seen else 0

    @property
    def _may_be_why(self) -> bool:
        """Whether what is lost can be why the allocator had to give memory back."""
        return not self._lost or self.bytes < self._WARNED * self._needed

    def _ask(self, number: int) -> None:
        self._asked, self._quiet_steps = max(number, self._least), 0
        self._settle()

    def _settle(self) -> None:
        self.bytes = min(max(self._asked, self._needed), self._most)
