"""Observe a step: what each run of a block costs in memory and time.

The paper observes a block by running its forward twice. It is not needed: when every block is
recomputed, the recompute is itself a forward with its activations kept, and at the points that our
own recompute code owns everything can be read. `RecomputeCollector` does that, at the price of
plain checkpointing; and once it is known which blocks are alike, only some of each kind are
recomputed. The paper's own way, for comparison, is in `shuttle.py`. Its filter for nested layers is
in the choice of blocks: no block lies inside another, so nothing is counted twice.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from mimose.costs import InputSize, Observation, Pattern, Run, StepObservation
from mimose.estimation import Sample
from mimose.execution import Listener
from mimose.interception import BlockInterceptor, Trials
from mimose.memory import Clock, Meter, Reading
from mimose.tensors import Gradients, PreviousOutputs, bytes_given, bytes_of
from mimose.training.block_observation import Seen


class RecomputeCollector(Listener):
    """Observes the recomputes of one step in which every block is recomputed, or a sample."""

    name = "ride"
    """What `collector=` and recordings call it."""
    samples = True
    """Whether some runs may be kept, if others tell of them."""

    def __init__(
        self,
        meter: Meter,
        clock: Clock,
        gradients: Gradients,
        stale: PreviousOutputs,
        in_use_before: int | None = None,
        sample: Sample | None = None,
    ) -> None:
        self._sample = sample
        self._meter = meter
        self._clock = clock
        self._previous_outputs = stale
        self._stale_bytes = 0
        missing = gradients.missing()
        # Where plans are not told of any that will be born, levels are seen with those that are.
        foreseen = gradients.parameters if any(missing) else ()
        self._missing = [p for p in foreseen if p.grad is None]
        self._some_missing = bool(self._missing)
        existing = ((p, p.grad) for p in gradients.parameters)
        self._existing = [(p, weakref.ref(grad)) for p, grad in existing if grad is not None]
        self.gradients_existed = bool(self._existing)
        self.gradients_cleared = False
        """Whether some of them were gone when the backward began."""
        self._may_be_cleared = gradients.updated
        self.gradients_born = gradients.to_be_born(missing)
        """Whether most come into being in the step, rather than being added to."""
        self._born = 0
        self._base: int | None = None
        self._in_use_before = in_use_before
        self._runs: list[Seen] = []
        self._counts: dict[int, int] = {}
        self._latest: Seen | None = None
        self._last_recomputed = sys.maxsize
        self._head_forward = 0
        self._head_backward: int | None = None
        self._tail: int | None = None
        self.peak = 0
        """The highest reading of the step."""
        self.peak_held = 0
        self._held_before = meter.read().held
        self._held_after = 0
        self._spoiled = False
        self._trials: Trials | None = None
        self._over = self._retained = False
        self.known_unused: set[Run] = set()
        """Runs that no loss is known to use."""
        self._lent: list[torch.UntypedStorage] = []
        """Held from a recompute to the next reading, as if the run before were kept."""
        self._left = False
        """Whether the backward has left the run that was recomputed last."""
        self._all_left = False
        """Whether it has left the model, for another one's."""
        self.straight = True
        """Whether blocks were recomputed in the reverse order of their forwards."""
        self.unlike = False
        """Whether runs that were taken for alike were not."""
        self.fleeting = False
        """Whether outputs that runs save themselves were let go of while others followed, or inputs
        that they do not save were collected until the model returned: then what one that is kept
        adds is more than can be told from levels."""

    def run_begins(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        """A block's forward is about to start; whether it will be recomputed."""
        reading, lent, gap = self._read(), [], 0
        if self._base is None:
            self._base = reading.in_use
        elif self._runs:
            last = self._runs[-1]
            last.forward = max(last.forward, reading.peak - self._base)
            # After a kept run its own forward is in the peak: what is between them is not told.
            gap = (reading.in_use if last.kept else reading.peak) - self._base
            self._settle_idle_inputs()
            if last.own_outputs:
                lent = last.pass_on(args, kwargs)
        nth = self._counts.get(interceptor.index, 0)
        self._counts[interceptor.index] = nth + 1
        interceptor.run = len(self._runs)
        interceptor.listener = self
        if self._trials is None:
            self._trials = Trials(interceptor.tried)
        given = bytes_given(args, kwargs)
        start = reading.in_use - self._base
        run = Seen((interceptor.index, nth), given, start, gap=gap, lent=lent)
        self._runs.append(run)
        if self._sample is not None and interceptor.trusted:
            run.kept = interceptor.guarded = not self._sample.again.get(run.key, True)
        return not run.kept

    @property
    def _dry_run(self) -> bool:
        """Whether a block was tried in the step: recomputed at once, with its own peak."""
        return self._trials is not None and self._trials.any_since

    def forward_ends(
        self, block: int, own_outputs: list[torch.UntypedStorage], idle_inputs: list[torch.Tensor]
    ) -> None:
        assert self._base is not None
        run = self._runs[block]
        run.forward_ends(own_outputs, idle_inputs)
        run.forward = self._read().peak - self._base

    def model_returns(self) -> None:
        """The model's forward is done; the loss and the backward follow."""
        if self._base is not None:
            self._settle_idle_inputs()
            self._head_forward = max(self._head_forward, self._read().peak - self._base)

    def spoil(self) -> None:
        """What is seen of this step will not count: something of the last one dies in it, say."""
        self._spoiled, self._lent = True, []

    def keep_no_more(self) -> None:
        """Whatever comes is recomputed."""
        if self._sample is not None:
            self._sample = self._sample._replace(again={})

    def before_recompute(self, block: int) -> None:
        if self._over:  # one more backward through the same graph
            return
        reading = self._read()
        assert self._base is not None
        run = self._runs[block]
        if self._head_backward is None:
            self._settle_outputs()
            self._stale_bytes = self._previous_outputs.died() + self._cleared_bytes()
            self._head_backward = reading.peak - self._base + self._stale_bytes
        else:
            self._note_back(reading)
        self.straight &= block < self._last_recomputed
        self._last_recomputed = block
        self._note_born()
        run.before = reading.in_use
        run.born = self._born
        run.entry = reading.in_use - self._base + self._stale_bytes - self._born
        run.begun = self._clock.mark()

    def after_recompute(self, block: int) -> None:
        if self._over:
            return
        run = self._runs[block]
        run.ended = self._clock.mark()
        reading = self._read()
        assert run.before is not None
        run.after = reading.in_use
        run.saved = reading.in_use - run.before
        run.spike = reading.peak - run.before
        self._latest, self._left = run, False
        self._lent = [storage for ref in run.lent if (storage := ref()) is not None]

    def awaits_backward(self, block: int) -> None:
        self._runs[block].awaited = True

    def backward_begins(self, block: int) -> None:
        run = self._runs[block]
        if self._over:
            run.late = True
            return
        run.entered = True
        if not run.kept:
            return
        self._note_born()
        run.born = self._born
        if self._latest is not None and not self._left:  # what comes is another run's backward
            self._note_back(self._read())
            self._left = True

    def backward_ends(self, block: int) -> None:
        if block == 0 and not self._over and self._latest is not None and self._tail is None:
            self._note_back(self._read())
            self._tail = 0

    def backward_over(self, *, retained: bool) -> None:
        """The step's backward is done; whether its graph outlives it."""
        reading = self._read()
        self._over, self._retained = True, retained
        self._held_after = reading.held
        if not self._all_left:
            self._note_tail(reading)
        self._note_born()
        self._missing, self._existing = [], []  # so that holding the collector holds no parameters

    def leaves_blocks(self) -> None:
        """The backward goes on in a model of another handle: what comes is no part of this one."""
        if not (self._over or self._all_left):
            self._note_tail(self._read())
            self._all_left = True

    def _note_tail(self, reading: Reading) -> None:
        if self._latest is None or self._base is None:
            return
        if self._tail is None:
            self._note_back(reading)
        self._note_born()
        self._tail = reading.peak - self._base + self._stale_bytes - self._born

    @property
    def in_backward(self) -> bool:
        """Whether a block was recomputed, and the backward is not done."""
        return self._head_backward is not None and not self._over

    @property
    def _used(self) -> list[Seen]:
        """The runs that the loss depended on: others show nothing of what they cost, so plans are
        not to know them."""
        return [run for run in self._runs if not run.unused]

    def _settle_unused(self) -> int:
        """The forwards of runs that no loss uses are what others find in between; the peak of those
        after the last one that is used."""
        beside = 0
        for run in self._runs:
            if run.unused:
                beside = max(beside, run.forward)
            else:
                run.gap, beside = max(run.gap, beside), 0
        return beside

    @property
    def unused(self) -> set[Run]:
        """The others, if the step's backward is done and no pass was given up."""
        if not self._over or self.given_up:
            return set()
        return {run.key for run in self._runs if run.unused}

    @property
    def given_up(self) -> frozenset[Run]:
        """The runs of passes that had no backward at all, and were not known to have none: they
        were given up, and the step is no example."""
        used = {run.key[1] for run in self._runs if not run.unused or run.late}
        others = {run.key for run in self._runs if run.key[1] not in used}
        return frozenset(others - self.known_unused)

    def unusable_beyond(self, highest_bytes: int) -> int:
        """What the allocator holds beyond the highest use of the run, if this step made it grow.

        What was cached before, up to that use, was of use then: it can be given back.
        """
        if self._held_after <= self._held_before:
            return 0
        return max(0, self._held_after - max(self.peak, highest_bytes))

    @property
    def born(self) -> tuple[Pattern, tuple[int, ...], int] | None:
        """The step's runs, and the gradients born before each and in all, if some were missing."""
        if not self._some_missing or not self._over:
            return None
        return self.pattern, tuple(run.born for run in self._used), self._born

    @property
    def kept(self) -> int:
        """How many runs were not recomputed, since others tell of them."""
        return sum(run.kept for run in self._runs)

    def observation(self, size: InputSize, *, rough: bool = False) -> StepObservation | None:
        """What was seen; None if it does not count, since nothing was recomputed, say.

        While the device has not got far enough to tell all times, bytes stand in for them. If a
        rough one will do, it may have been a step in which blocks were tried out.
        """
        if self._head_backward is None or self._spoiled or (self._dry_run and not rough):
            return None
        if self.given_up:
            return None
        timed = self.timed
        after_last = self._settle_unused()
        seen = StepObservation(
            size=size,
            pattern=self.pattern,
            runs=tuple(self._finished(run, timed=timed) for run in self._used),
            head_forward_bytes=max(self._head_forward, after_last),
            head_backward_bytes=self._head_backward,
            tail_bytes=self._tail or 0,
            prelude_bytes=self._prelude(),
            gradients_born=self.gradients_born,
            all_born_bytes=self._born,
            retained=self._retained,
        )
        if not self.kept:
            return seen
        assert self._sample is not None
        similar, kept = self._sample.similar, [run.kept for run in self._used]
        if not self.straight or not similar.speaks_of(seen):
            return None
        whole = similar.complete(seen, kept)
        self.unlike = whole is None
        return whole

    def _prelude(self) -> int | None:
        if self._in_use_before is None or self._base is None:
            return None
        return self._base - self._in_use_before

    @property
    def pattern(self) -> Pattern:
        """The step's runs, in the order of their forwards."""
        return tuple(run.key for run in self._used)

    @property
    def timed(self) -> bool:
        """Whether all recompute times are known by now."""
        return all(self._seconds(run) is not None for run in self._runs)

    def _settle_idle_inputs(self) -> None:
        """The last run is over and its caller has moved on: what of its input is left to it alone?

        Not what the first run takes (its caller often holds on to that), nor what the run before
        saves itself.
        """
        alone = len(self._runs) > 1 and not self._saves_its_output(-2)
        self._runs[-1].settle_idle_inputs(alone=alone)

    def _settle_outputs(self) -> None:
        for run in self._runs:
            let_go = run.settle_outputs()
            self.fleeting |= let_go and run is not self._runs[-1]

    def _saves_its_output(self, at: int) -> bool:
        run = self._runs[at]
        if not run.kept or self._sample is None:
            return bool(run.out_saved)
        return self._sample.similar.saves_its_output(run.key)

    def _finished(self, run: Seen, *, timed: bool) -> Observation:
        # Times and what stands in for them are never mixed: they are compared with each other.
        seconds = (self._seconds(run) or 0.0) if timed else max(0, run.saved) * 1e-12
        return run.observation(seconds)

    def _seconds(self, run: Seen) -> float | None:
        return 0.0 if run.ended is None else self._clock.seconds(run.begun, run.ended)

    def _read(self) -> Reading:
        self._lent = []  # they are in the peak; what is in use is to be read without them
        reading = self._meter.read()
        self.peak = max(self.peak, reading.peak)
        self.peak_held = max(self.peak_held, reading.peak_held)
        self._meter.reset_peak()
        return reading

    def _cleared_bytes(self) -> int:
        """The bytes of gradients cleared since the forward: like stale outputs, and born anew."""
        self.gradients_cleared = any(p.grad is None for p, _ in self._existing)
        if not self.gradients_cleared:
            return 0
        # The head's have come into being again by now.
        cleared = [p for p, grad in self._existing if p.grad is None or p.grad is not grad()]
        # Only where the next such step is foreseen to clear them: it is to find this one.
        self.gradients_born |= self._may_be_cleared
        self._missing += cleared
        self._some_missing = True
        return bytes_of(cleared)

    def _note_back(self, reading: Reading) -> None:
        """The backward of the run that was recomputed last has risen so far."""
        if self._latest is not None and not self._left:
            self._latest.back = max(self._latest.back, reading.peak - self._latest.after)

    def _note_born(self) -> None:
        still = [p for p in self._missing if p.grad is None]
        if len(still) < len(self._missing):
            self._born += bytes_of(p for p in self._missing if p.grad is not None)
            self._missing = still
