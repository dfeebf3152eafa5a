"""Observe a step: what each run of a block costs in memory and time.

The paper observes a block by running its forward twice. It is not needed. A block that is kept
under hooks of ours shows what keeping costs: the difference in memory at its borders, the peak in
between, and the time of its forward. A block that is recomputed shows the same in its recompute. So
whatever a block does in an observed step (kept, evicted, recomputed), it is measured, and an
observed step takes hardly longer than a planned one. The paper's own way, for comparison, is in
`shuttle.py`. Its filter for nested layers is in the choice of blocks: no block lies inside another,
so nothing is counted twice.

All levels are reduced to a step in which every run is recomputed: what kept runs hold at a moment
is subtracted from what is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mimose.costs import InputSize, Pattern, Profile, Run, RunCost, StepObservation
from mimose.execution import ForwardEnd, Listener
from mimose.memory import Clock, Meter, Reading
from mimose.tensors import Gradients, PreviousOutputs, keeps_graph
from mimose.training.boundary_tensors import BoundaryTensors
from mimose.training.gradient_counter import GradientCounter
from mimose.training.measured_runs import MeasuredRuns
from mimose.training.run_observation import RunObservation
from mimose.training.step_readings import StepReadings

Look = Callable[[str, int, int], bool]
"""Called with `"forward"`, `"head"` or `"backward"`, the number of the run and the bytes in use;
tells whether something was evicted."""


class Collector(Listener):
    """Observes one step."""

    name = "ride"
    """Its name in `collector=` and in recordings."""
    keeps = True
    """Whether it can measure blocks that are kept."""

    def __init__(
        self,
        meter: Meter,
        clock: Clock,
        gradients: Gradients,
        previous: PreviousOutputs,
        in_use_before: int | None = None,
        known_unused: frozenset[Run] = frozenset(),
        known: Mapping[Run, RunCost] | None = None,
    ) -> None:
        self.readings = StepReadings(meter)
        self._clock = clock
        clock.follow_stream()
        self.gradients = GradientCounter(gradients)
        self._previous_outputs = previous
        self._in_use_before = in_use_before
        self._known_unused = known_unused
        self._known = known or {}
        """The last known costs of runs, for what cannot be measured while they are kept."""
        self._under_autocast = torch.is_autocast_enabled(clock.device.type)
        self._runs: list[RunObservation] = []
        self._levels = _StepLevels()
        self._latest: RunObservation | None = None
        """The run whose backward is in progress."""
        self.held = 0
        """Bytes that kept runs hold now, beyond a step in which every run is recomputed."""
        self._away = 0
        """Bytes of recomputed runs' inputs that are on the host now."""
        self._spoiled = self._over = self._retained = False
        self.look: Look | None = None
        """Called whenever memory may have run short, to evict."""

    # The forward

    def run_begins(self, run: Run, args: Any, kwargs: Any, *, keep: bool) -> int:
        """A block's forward is about to start. Returns the number of this run."""
        reading, shared, between = self.readings.read(), [], 0
        if self._levels.base is None:
            self._levels.base = reading.in_use
        elif self._runs:
            last = self._runs[-1]
            between = (reading.in_use if last.fixed else reading.peak) - self._others
            if last.fixed:
                last.forward = reading.peak - last.start_in_use
            self._settle_inputs()
            if self._under_autocast and not (last.kept or last.fixed):
                left = reading.in_use - last.start_in_use - last.tensors.output_bytes
                last.casts = max(0, left)
            if last.tensors.saved_outputs:
                shared = last.tensors.pass_outputs_on(args, kwargs)
            self._settle_dropped()
        number, start = len(self._runs), reading.in_use - self._others
        seen = RunObservation(
            run,
            start=start,
            start_in_use=reading.in_use,
            tensors=BoundaryTensors(shared),
            kept=keep,
            between=between,
            casts=self._known[run].shared_casts if run in self._known else 0,
        )
        self._runs.append(seen)
        seen.start_in_use = self._look("forward", number, reading.in_use)
        if keep:
            seen.begun = self._clock.mark()
        return number

    @property
    def risen_bytes(self) -> int:
        """The increase of memory in use from the step's start to that of the last run."""
        return self._runs[-1].start_in_use - self._base if self._runs else 0

    def _settle_dropped(self) -> None:
        """Count outputs that the model has dropped and only kept runs still hold."""
        for run in self._runs:
            if run.kept and run.tensors.saved_outputs and (dropped := run.dropped_output_bytes):
                run.held += dropped
                self.held += dropped

    def forward_ends(self, run: int, end: ForwardEnd) -> None:
        seen = self._runs[run]
        if seen.kept:
            seen.ended = self._clock.mark()
        reading = self.readings.read()
        seen.forward_ends(end, reading.in_use, reading.peak)
        self.held += max(0, seen.held - seen.casts)

    def before_head(self) -> None:
        """The last planned run has returned."""
        reading = self.readings.read()
        self._levels.head_forward = max(self._levels.head_forward, reading.peak - self._others)
        self._look("head", len(self._runs), reading.in_use)

    def model_returns(self) -> None:
        """The model's forward has returned; the loss and the backward follow."""
        if self._levels.base is not None:
            self._settle_inputs()
            reading = self.readings.read()
            peak = reading.peak - self._others
            self._settle_dropped()
            self._levels.head_forward = max(self._levels.head_forward, peak)

    def _settle_inputs(self) -> None:
        """Measure which inputs of the last run could be dropped, now that its caller has moved on.

        Not what the first run takes (its caller often holds it), nor what the run before saves.
        """
        may = len(self._runs) > 1 and not self._runs[-2].tensors.output_saved
        self._runs[-1].tensors.settle_inputs(may_be_dropped=may)

    # The backward

    def awaits_backward(self, run: int) -> None:
        self._runs[run].backward.awaited = True

    def backward_begins(self, run: int) -> None:
        backward = self._runs[run].backward
        if self._over:
            backward.late = True
        else:
            backward.entered = True

    def before_use(self, run: int) -> None:
        if self._over:
            return
        seen = self._runs[run]
        reading = self._enter(seen)
        seen.backward.active_in_use = self._look("backward", run, reading.in_use)

    def before_recompute(self, run: int) -> None:
        seen = self._runs[run]
        if self._over:  # one more backward through the same graph
            return
        reading = self._enter(seen)
        seen.backward.active_in_use = self._look("backward", run, reading.in_use)
        seen.begun = self._clock.mark()

    def after_recompute(self, run: int) -> None:
        if self._over:
            return
        seen, before = self._runs[run], self._runs[run].backward.active_in_use
        seen.ended = seen.backward.begun = self._clock.mark()
        reading = self.readings.read()
        seen.backward.active_in_use = reading.in_use
        seen.saved, seen.spike = reading.in_use - before, reading.peak - before
        # Detached: with its graph it would be held by its own hooks, if the backward broke off.
        shared = [t.detach() for ref in seen.tensors.shared_inputs if (t := ref()) is not None]
        self.readings.borrow(shared)

    def backward_ends(self, run: int) -> None:
        if run == 0 and not self._over and self._latest is not None:
            self._leave(self.readings.read())

    def backward_over(self, *, retained: bool) -> None:
        """The step's backward has ended; `retained` if its graph remains."""
        reading = self.readings.read()
        self._over, self._retained = True, retained
        if self._levels.tail is None:
            self._note_tail(reading)
        self.gradients.so_far()
        self.gradients.release()

    def leaves_blocks(self) -> None:
        """The backward continues in another handle's model, which is not part of this step."""
        if not self._over and self._levels.tail is None:
            self._note_tail(self.readings.read())

    def recomputed_instead(self) -> None:
        """The last run ran out of memory while kept, and is recomputed."""
        if self._runs:
            last = self._runs[-1]
            last.kept, last.begun, last.ended = False, None, None
            last.start_in_use = self.readings.read().in_use

    def evicted(self, run: int, freed_bytes: int) -> None:
        """The activations of a kept run were evicted, which freed `freed_bytes`."""
        seen = self._runs[run]
        seen.kept, seen.held = False, max(0, seen.held - freed_bytes)
        in_backward = self._levels.head_backward is not None
        self.held -= freed_bytes
        if not in_backward:  # what it leaves behind anyway stays until the forwards are over
            seen.held = max(0, seen.held - seen.casts)
        seen.begun = seen.ended = None

    def input_leaves(self, run: Run) -> None:
        """The input of a recomputed run is on its way to the host."""
        for seen in reversed(self._runs):
            if seen.run == run:
                seen.input_leaves = True
                return

    def input_left(self, run: Run, freed_bytes: int) -> None:
        """The input of a run has left the device, which freed `freed_bytes`."""
        self._away += freed_bytes
        for seen in reversed(self._runs):
            if seen.run == run:
                seen.input_leaves = False
                seen.tensors.movable_input = freed_bytes
                return

    def input_is_back(self, taken_bytes: int) -> None:
        """An input is back on the device and takes `taken_bytes`."""
        self._away -= taken_bytes

    def _enter(self, seen: RunObservation) -> Reading:
        """The backward has reached a run."""
        reading, levels = self.readings.read(), self._levels
        if levels.head_backward is None:
            before = sum(each.held for each in self._runs)
            self._settle_dropped()
            for each in self._runs:
                each.tensors.settle_outputs()
            self.held = sum(each.held for each in self._runs)
            gone = self._previous_outputs.freed_bytes() + self.gradients.backward_begins()
            levels.previous = gone
            levels.head_backward = reading.peak - self._base - before + self._away + gone
        mark = self._clock.mark()
        if self._latest is not None:
            self._leave(reading, mark)
        gradients = seen.backward.gradients = self.gradients.so_far()
        level = reading.in_use - self._others + levels.previous - gradients
        # Its own outputs that it saves are gone by now in a step in which it is recomputed.
        seen.backward.entry = level - (seen.saved - seen.held if seen.kept else 0)
        self._latest = seen
        seen.backward.begun = mark
        return reading

    def _leave(self, reading: Reading, mark: Any = None) -> None:
        """The backward has left the latest run, at this mark of the clock."""
        latest = self._latest
        if latest is None:
            return
        backward = latest.backward
        backward.peak = max(backward.peak, reading.peak - backward.active_in_use)
        backward.ended = self._clock.mark() if mark is None else mark
        if latest.held and not keeps_graph():
            self.held -= latest.held
            latest.held = 0
        self._latest = None

    def _note_tail(self, reading: Reading) -> None:
        levels = self._levels
        if levels.head_backward is None or levels.base is None:
            return
        if self._latest is not None:
            self._leave(reading)
        first = next((run.backward.gradients for run in self._runs if not run.unused), 0)
        levels.tail = reading.peak - self._others + levels.previous - first

    # What came of it

    def spoil(self) -> None:
        """Discard the measurements of this step, because memory of another step distorts them."""
        self._spoiled = True
        self.readings.borrow([])

    @property
    def in_backward(self) -> bool:
        """Whether the backward has reached a block and has not ended."""
        return self._levels.head_backward is not None and not self._over

    @property
    def unused(self) -> set[Run]:
        """Runs whose output the loss did not use. Empty before the end of the backward, or if a
        whole pass had none."""
        if not self._over or self.without_backward:
            return set()
        return {run.run for run in self._runs if run.unused}

    @property
    def without_backward(self) -> frozenset[Run]:
        """The runs of passes that unexpectedly had no backward at all. Nothing is learned from a
        step with such passes."""
        used = {run.run[1] for run in self._runs if not run.unused or run.backward.late}
        others = {run.run for run in self._runs if run.run[1] not in used}
        return frozenset(others - self._known_unused)

    @property
    def pattern(self) -> Pattern:
        """The step's runs that the loss used, in the order of their forwards."""
        return self._measured_runs().pattern

    @property
    def gradients_allocated(self) -> tuple[Pattern, tuple[int, ...], int] | None:
        """The step's runs, and the gradients allocated before each and in all, if any were."""
        if not self.gradients.counts or not self._over:
            return None
        runs = self._measured_runs()
        return runs.pattern, runs.gradients, self.gradients.so_far()

    @property
    def timed(self) -> bool:
        """Whether the device has reported all times by now."""
        return self._measured_runs().timed

    def observation(self, size: InputSize) -> StepObservation | None:
        """What was measured; None if it does not count.

        Until the device has reported all times, bytes stand in for them.
        """
        levels = self._levels
        if levels.head_backward is None or self._spoiled or self.without_backward:
            return None
        runs = self._measured_runs()
        return StepObservation(
            pattern=runs.pattern,
            profile=Profile(
                size,
                runs.costs(timed=runs.timed),
                max(levels.head_forward, runs.peak_after_last),
                levels.head_backward,
                levels.tail or 0,
                None if self._in_use_before is None else self._base - self._in_use_before,
            ),
            gradients_allocated=runs.gradients,
            all_gradients_allocated=self.gradients.so_far(),
            allocates=self.gradients.most,
            retained=self._retained,
        )

    def _measured_runs(self) -> MeasuredRuns:
        return MeasuredRuns(self._runs, self._known, self._clock)

    @property
    def _base(self) -> int:
        return self._levels.base or 0

    @property
    def _others(self) -> int:
        """The base and what kept runs hold, less inputs on the host. A reading minus this is the
        level of a step in which every run is recomputed."""
        return self._base + self.held - self._away

    def _look(self, where: str, run: int, in_use: int) -> int:
        """Evict if memory is short. Returns the bytes in use after that."""
        if self.look is None or not self.look(where, run, in_use):
            return in_use
        return self.readings.read().in_use


class _StepLevels:
    """Levels of the step outside of its runs."""

    __slots__ = ("base", "head_backward", "head_forward", "previous", "tail")

    def __init__(self) -> None:
        self.base: int | None = None
        """In use when the first run started."""
        self.head_forward = 0
        self.head_backward: int | None = None
        self.tail: int | None = None
        self.previous = 0
        """Bytes of the previous step that were alive in the forward and freed by the backward."""
