"""Step times without pauses such as an evaluation, a checkpoint or a breakpoint."""

from __future__ import annotations

_MOST_BETWEEN = 4
"""The most time between two steps that counts, as a multiple of the usual time between them."""
_SMOOTHING = 8
"""Each step contributes one part in this many to the moving average of the time between steps."""


class Pace:
    """Turns measured times of consecutive steps into step times.

    A step's time includes the time after its backward: the optimizer's step and, on a GPU, the wait
    for kernels that were only launched. A gap much longer than usual is cut, since it is a pause.
    """

    def __init__(self) -> None:
        self._usual_between: float | None = None

    def seconds(self, inside: float, from_start_to_start: float) -> float:
        """The time of a step.

        `inside` is the time from its first block to the end of its backward, `from_start_to_start`
        the time from its first block to the next step's first block.
        """
        if self._usual_between is None:
            self._usual_between = inside
        longest = _MOST_BETWEEN * self._usual_between
        between = min(max(0.0, from_start_to_start - inside), longest)
        self._usual_between += (between - self._usual_between) / _SMOOTHING
        return inside + between
