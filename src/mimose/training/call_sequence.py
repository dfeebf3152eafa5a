"""Which call of which block comes next in a step: the only place where calls are counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mimose.costs import Run


class CallSequence:
    """Counts the calls of each block in one step, and compares their order with the plan's."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._expected: Iterator[Run] | None = None
        self._may_skip = False
        self.first_block = -1
        """The block that ran first; the next pass begins with it again."""
        self.unplanned = 0
        """Runs that the plan does not know because no loss uses them."""
        self.skipped = False
        """Whether runs that were expected did not come."""
        self.out_of_order = False
        """Whether one came after others that are expected later."""

    def next(self, block: int) -> Run:
        """The block is called: its index, and which call in this step it is."""
        if not self._counts:
            self.first_block = block
        nth = self._counts.get(block, 0)
        self._counts[block] = nth + 1
        return block, nth

    def expect(self, runs: Iterable[Run], *, may_skip: bool) -> None:
        """Expect these runs from now on, in this order; steps of this model may skip some."""
        self._expected, self._may_skip = iter(runs), may_skip

    @property
    def expects_order(self) -> bool:
        return self._expected is not None

    def follows(self, run: Run) -> bool:
        """Whether a run that has begun is the one expected next, or skips no more than steps do."""
        expected = self._expected
        if expected is None or next(expected, None) == run:
            return True
        self.skipped = run in expected  # which takes out of it all that come before
        if not self.skipped:
            self.out_of_order, self._expected = True, None
        return self.skipped and self._may_skip

    def has_come(self, run: Run) -> bool:
        return self._counts.get(run[0], 0) > run[1]

    @property
    def count(self) -> int:
        """How many calls there were."""
        return sum(self._counts.values())
