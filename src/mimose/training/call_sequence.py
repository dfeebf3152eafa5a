"""The calls of blocks in a step, in order. Calls are counted here only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mimose.costs import Run


class CallSequence:
    """Counts the calls of each block in one step, and compares their order with the plan."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._expected: Iterator[Run] | None = None
        self._may_skip = False
        self.first_block = -1
        """The block that ran first; each further pass begins with it again."""
        self.unplanned = 0
        """The number of runs that are not in the plan because no loss uses them."""
        self.skipped = False
        """Whether expected runs were skipped."""
        self.out_of_order = False
        """Whether a run came after runs that were expected later."""

    def next(self, block: int) -> Run:
        """Count a call of this block: returns the block and which of its calls this is, from 0."""
        if not self._counts:
            self.first_block = block
        nth = self._counts.get(block, 0)
        self._counts[block] = nth + 1
        return block, nth

    def expect(self, runs: Iterable[Run], *, may_skip: bool) -> None:
        """Expect these runs from now on, in this order; `may_skip` if skipped runs are normal."""
        self._expected, self._may_skip = iter(runs), may_skip

    @property
    def expects_order(self) -> bool:
        return self._expected is not None

    def follows(self, run: Run) -> bool:
        """Whether this run is the next expected one, or skips only runs that may be skipped."""
        expected = self._expected
        if expected is None or next(expected, None) == run:
            return True
        comes_later = run in expected  # consumes the iterator up to this run
        self.skipped |= comes_later
        if not comes_later:
            self.out_of_order, self._expected = True, None
        return comes_later and self._may_skip

    def has_come(self, run: Run) -> bool:
        return self._counts.get(run[0], 0) > run[1]

    @property
    def count(self) -> int:
        """The number of calls so far."""
        return sum(self._counts.values())
