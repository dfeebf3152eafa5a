"""From what was measured of a step's runs to what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mimose.costs import Pattern, Run, RunCost
from mimose.memory import Clock
from mimose.training.run_observation import RunObservation

_SAME = 0.005
"""Two runs are of one kind if their spikes differ by no more than this share of them."""


class MeasuredRuns:
    """The runs of a step whose backward is over."""

    def __init__(
        self, runs: Sequence[RunObservation], known: Mapping[Run, RunCost], clock: Clock
    ) -> None:
        self._clock = clock
        self._known = known
        """What runs cost before: some of it cannot be measured while they are kept."""
        self._used: list[RunObservation] = []
        """The runs that the loss depended on. Others show nothing of what they cost."""
        peak = 0
        for run in runs:  # forwards of unused runs count as memory between their neighbours
            if run.unused:
                peak = max(peak, run.start + run.forward)
            else:
                self._used.append(replace(run, between=max(run.between, peak)))
                peak = 0
        self.peak_after_last = peak
        """The highest forward peak of unused runs after the last used one."""

    @property
    def pattern(self) -> Pattern:
        """The used runs, in the order of their forwards."""
        return tuple(run.run for run in self._used)

    @property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of gradients that were allocated before each run's backward."""
        return tuple(run.backward.gradients for run in self._used)

    @property
    def timed(self) -> bool:
        """Whether the device has reported all times by now.

        The first run's backward is checked first, because it ends last.
        """
        times = (
            time(run) for run in self._used for time in (self._backward_seconds, self._seconds)
        )
        return all(seconds is not None for seconds in times)

    def costs(self, *, timed: bool) -> tuple[RunCost, ...]:
        """The costs of the used runs; unless `timed`, bytes stand in for times."""
        costs, start = [], 0
        recomputed = [run for run in self._used if not (run.kept or run.was_kept or run.fixed)]
        for run in self._used:
            if run.was_kept:
                run = replace(run, forward=self._forward_if_recomputed(run, recomputed))
            # Times and what stands in for them are never mixed: they are compared with each other.
            seconds = (self._seconds(run) or 0.0) if timed else max(0, run.saved) * 1e-12
            backward = (self._backward_seconds(run) or 0.0) if timed else 0.0
            costs.append(run.cost(start, round(seconds * 1e9), round(backward * 1e9)))
            start = run.start
        if len(costs) > 1 and not costs[-1].shared_casts:  # only a following run could tell
            costs[-1] = costs[-1]._replace(shared_casts=costs[-2].shared_casts)
        return tuple(self._with_movable_inputs(costs))

    def _with_movable_inputs(self, costs: list[RunCost]) -> list[RunCost]:
        """The costs, with `input_movable` completed where this step could not show it.

        It cannot for kept runs, and for inputs that were sent to the host and never left the
        device. These take it from a similar run, or from the last observation of the same run.
        """
        movable = {(cost.boundary, cost.saved) for cost in costs if cost.input_movable}
        return [
            cost._replace(input_movable=True)
            if (run.was_kept or run.input_leaves)
            and ((cost.boundary, cost.saved) in movable or self._was_movable(run.run))
            else cost
            for run, cost in zip(self._used, costs, strict=True)
        ]

    def _was_movable(self, run: Run) -> bool:
        known = self._known.get(run)
        return known is not None and known.input_movable

    def _forward_if_recomputed(self, kept: RunObservation, recomputed: list[RunObservation]) -> int:
        """The forward peak that a kept run would have had if it had been recomputed.

        It is that of a recomputed run of the same kind. If there is none, it is the share of the
        spike that it was in the last observation, or all of the spike.
        """
        for run in recomputed:
            if abs(run.spike - kept.spike) <= _SAME * kept.spike:
                return min(run.forward, kept.spike)
        known = self._known.get(kept.run)
        if known is None or not known.recompute_peak:
            return kept.spike
        return round(kept.spike * min(1.0, known.forward_peak / known.recompute_peak))

    def _seconds(self, run: RunObservation) -> float | None:
        return 0.0 if run.ended is None else self._clock.seconds(run.begun, run.ended)

    def _backward_seconds(self, run: RunObservation) -> float | None:
        begun, ended = run.backward.begun, run.backward.ended
        return 0.0 if begun is None or ended is None else self._clock.seconds(begun, ended)
