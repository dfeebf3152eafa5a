"""The calls of blocks in a step, in order. Calls are counted here only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mimose.costs import Run


class CallSequence:
    """Counts the calls of each block in one step, and compares their order with the plan."""

    unplanned = 0
    """The number of runs that are not in the plan because no loss uses them."""
    skipped = False
    """Whether expected runs were skipped."""
    out_of_order = False
    """Whether a run came after runs that were expected later."""
    expects_order = False
    _may_skip = False
    _next_expected: Run | None = None
    """None if no order is expected, or no further run."""
    _expected_later: Iterator[Run] = iter(())

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def next(self, block: int) -> tuple[Run, bool]:
        """Count a call of this block.

        Returns the block and which of its calls this is, from 0; and whether it is the next
        expected run.
        """
        nth = self._counts.get(block, 0)
        self._counts[block] = nth + 1
        run = block, nth
        if run != self._next_expected:
            return run, False
        self._next_expected = next(self._expected_later, None)
        return run, True

    def expect(self, runs: Iterable[Run], *, may_skip: bool) -> None:
        """Expect these runs from now on, in this order; `may_skip` if skipped runs are normal."""
        self._expected_later, self._may_skip = iter(runs), may_skip
        self._next_expected = next(self._expected_later, None)
        self.expects_order = True

    def may_come_now(self, run: Run) -> bool:
        """Whether a planned run that is not the next expected one may come now: no order is
        expected, or it skips only runs that may be skipped."""
        if not self.expects_order:
            return True
        comes_later = run in self._expected_later  # consumes the iterator up to this run
        if comes_later:
            self.skipped = True
            self._next_expected = next(self._expected_later, None)
        else:
            self.out_of_order, self.expects_order, self._next_expected = True, False, None
        return comes_later and self._may_skip

    def has_come(self, run: Run) -> bool:
        return self._counts.get(run[0], 0) > run[1]

    @property
    def count(self) -> int:
        """The number of calls so far."""
        return sum(self._counts.values())
