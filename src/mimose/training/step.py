"""One training step, from its first block's forward to the end of its backward.

A step gets its decision when its first block starts. If the prediction behind the plan is trusted,
each block does as the plan says and nothing else happens (the paper's responsive execution). If it
is not, kept activations may be evicted, and a collector measures what every run costs (the paper's
sheltered execution). If nothing is known, every block is recomputed and measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from mimose.costs import InputSize, Option, Run
from mimose.estimation import CostModel, Surprise
from mimose.execution import nodes_of
from mimose.interception import KEEP, RECOMPUTE, Directive, Tried
from mimose.memory import Reading
from mimose.planning import CachedPlan, Plan
from mimose.tensors import tensors_in
from mimose.training.backward_watch import BackwardWatch
from mimose.training.call_sequence import CallSequence
from mimose.training.collector import Collector
from mimose.training.decision import Decision
from mimose.training.eviction import StepEvictor
from mimose.training.nesting import Nesting
from mimose.training.transfers import StepTransfers

_After = Callable[[Any, Any], None]
"""Called with the inputs and the output of a block's call."""


_AMPLE = 0.5
"""A plan that needs no more than this share of the available bytes leaves room for other runs."""


class StepOwner(Protocol):
    """Learns when the backwards of a step are over."""

    def step_over(self, step: Step) -> None: ...
    def later_backward_over(self, step: Step) -> None: ...


class Step:
    """Carries out a decision: returns the directive for each call of a block."""

    def __init__(
        self,
        decision: Decision,
        start: Reading,
        *,
        expected: InputSize,
        size: InputSize,
        cost_model: CostModel,
        owner: StepOwner,
        collector: Collector | None = None,
        evictor: StepEvictor | None = None,
        transfers: StepTransfers | None = None,
        tried: Tried | None = None,
    ) -> None:
        self._owner = owner
        self.decision = decision
        self.cost_model = cost_model
        """The cost model that the plan was made from."""
        self.start = start
        self.expected = expected
        """The size of the whole step, expected passes included."""
        self.size = size
        """The size of the passes that have begun; in planned steps, the expected size."""
        self.collector = collector
        self.evictor = evictor
        self._transfers = transfers
        self._cached = decision.cached
        """The plan as it is carried out: at first as decided."""
        self.calls = CallSequence()
        self.over = False
        self.backward = BackwardWatch(self)
        self.nesting = Nesting()
        self.surprises: set[Surprise] = set()
        self.after_broken = False
        """Whether memory of an unfinished step was still held at the start."""
        self.after_forward: list[Callable[[], None]] = []
        """Called when the last planned run has returned."""
        if transfers is not None:
            self.after_forward.append(transfers.after_last_forward)
        self._trials = tried, 0 if tried is None else tried.trials
        """Counts the trials of blocks; and how many there were before this step."""
        if evictor is not None:
            self._follow()
            if collector is not None:
                self.after_forward.append(collector.before_head)
            self.after_forward.append(evictor.before_head)

    def _follow(self) -> None:
        if self.evictor is not None:
            may_evict = self.decision.may_evict
            choices = self._cached.choices
            unseen = {r for r, o in choices.items() if o is Option.KEEP and not may_evict(r)}
            self.evictor.follow(self._cached.profile, choices, unseen)

    @property
    def plan(self) -> Plan:
        """The plan as it is carried out."""
        return self._cached.plan

    @property
    def has_plan(self) -> bool:
        return bool(self._cached.plan.choices)

    # How blocks run

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        """The directive for the next call of this block."""
        cached, (run, as_expected) = self._cached, self.calls.next(block)
        option = cached.choices.get(run)
        # In a measured step nobody may know yet whether the loss uses this run.
        watch = self.backward.pending or self.collector is not None
        after: _After | None = self.backward.watch if watch else None
        if option is None:
            option, after = self._unknown(run, after)
        elif not (as_expected or self.calls.may_come_now(run)):
            self._be_strict(run)
            option = Option.RECOMPUTE
        guarded = run in cached.guarded
        if self.after_forward and run == self._last_planned:
            after = _both(after, self._forward_ends)
        mover = None
        if self._transfers is not None:
            mover = self._transfers.before_forward(run, args, kwargs)
            if mover is not None and not self.has_plan:
                option = Option.RECOMPUTE_FROM_HOST
            after = _both(self._transfers.watch(run), after)
        collector, evictor = self.collector, self.evictor
        if collector is None and evictor is None:
            if after is None and not guarded:
                if option is Option.KEEP:
                    return KEEP
                if option is Option.RECOMPUTE:
                    return RECOMPUTE
            return Directive(option, guarded=guarded, after=after, mover=mover)
        number = -1 if evictor is None else evictor.run_begins(run)
        plainly = False
        if collector is not None:
            number = collector.run_begins(run, args, kwargs, keep=option is Option.KEEP)
        elif option is Option.KEEP and not self.decision.may_evict(run):
            guarded = plainly = True
        return Directive(
            option, number, collector or evictor, evictor, guarded, plainly, after, mover
        )

    def _unknown(self, run: Run, after: _After | None) -> tuple[Option, _After | None]:
        """Recompute a run that is not in the plan, and, unless memory is ample, all that follow."""
        if run in self.cost_model.unused:
            self.calls.unplanned += 1
            after = _Beside(self, run)
        elif self.has_plan:
            if Surprise.OUT_OF_MEMORY not in self.surprises:
                self.surprises.add(Surprise.UNKNOWN_RUN)
            if self.plan.peak_bytes > _AMPLE * self.decision.available_bytes:
                self.recompute_the_rest()
        return Option.RECOMPUTE, after

    def _be_strict(self, run: Run) -> None:
        """Recompute all remaining runs, because another run was expected now. What is kept so far
        is what the plan keeps up to here."""
        surprise = Surprise.RUNS_SKIPPED if self.calls.skipped else Surprise.OTHER_ORDER
        self.surprises.add(surprise)
        self._recompute(run)

    def recompute_the_rest(self) -> None:
        """Recompute all runs that have not begun."""
        self._recompute(None)

    def _recompute(self, current: Run | None) -> None:
        """Recompute the current run, if there is one, and all that have not begun."""
        choices = {
            run: option if self.calls.has_come(run) and run != current else Option.RECOMPUTE
            for run, option in self._cached.choices.items()
        }
        plan = replace(self.plan, choices=tuple(choices.values()))
        self._cached = replace(self._cached, plan=plan, choices=choices)
        self._follow()

    def ran_out(self) -> None:
        """A kept run ran out of memory and is recomputed instead."""
        self.surprises.add(Surprise.OUT_OF_MEMORY)
        if self.collector is not None:
            self.collector.recomputed_instead()
        self.recompute_the_rest()

    def is_used(self, run: Run) -> None:
        """The backward has reached a run that no loss used before, so no plan includes it."""
        self.cost_model.unused.discard(run)
        self.surprises.add(Surprise.UNKNOWN_RUN)

    def _forward_ends(self, *_: Any) -> None:
        """The last planned run has returned."""
        for call in self.after_forward:
            call()

    @property
    def _last_planned(self) -> Run | None:
        return next(reversed(self._cached.choices), None)

    @property
    def forward_is_over(self) -> bool:
        """Whether no more runs are expected."""
        last = self._last_planned
        return last is not None and self.calls.has_come(last)

    # Several passes

    def another_pass(self, size: InputSize, *, larger: bool) -> None:
        """Another forward begins before the backward; `larger` if it exceeds the expected one."""
        if larger:
            self.recompute_the_rest()
        if self.collector is not None:
            self.size = self.size.followed_by(size)
        self.backward.another_pass()

    @property
    def choices_so_far(self) -> tuple[Option, ...] | None:
        """The choices of the runs so far; None if they did not follow the order of the plan."""
        done = [self.calls.has_come(run) for run in self._cached.choices]
        ran = done.index(False) if False in done else len(done)
        return None if any(done[ran:]) else self.plan.choices[:ran]

    def plan_rest(self, size: InputSize, cached: CachedPlan, *, may_skip: bool) -> None:
        """Use a new plan for the remaining runs, now that the size of the step is known."""
        self.expected, self._cached = size, cached
        if self.collector is None:
            self.size = size
        self.decision = self.decision._replace(cached=cached)
        if self.calls.expects_order:
            to_come = [run for run in cached.choices if not self.calls.has_come(run)]
            self.calls.expect(to_come, may_skip=may_skip)
        self._follow()

    # Its end

    def model_returns(self, out: Any) -> None:
        """The model's forward has returned. If no block returned a tensor with a graph, watch the
        output of the model instead."""
        if self.collector is not None:
            self.collector.model_returns()
        if self.backward.blind:
            self.backward.watch((), out)
        if not self.nesting.alone:
            for node in nodes_of(tensors_in(out)):
                node.register_prehook(self.goes_on)

    def goes_on(self, *_: Any) -> None:
        """This step continues (another block, or its backward) after steps of other handles."""
        for inner in self.nesting.goes_on():
            if not inner.over:
                inner.outer_goes_on(self)

    def outer_goes_on(self, outer: Step) -> None:
        """The outer step continues while this one is open."""
        self.nesting.interrupted |= not self.backward.begun
        outer.nesting.interrupts |= self.nesting.interrupted
        if self.collector is None:
            return
        if not self.nesting.interrupted:
            self.collector.leaves_blocks()
        elif outer.kept_anything:  # levels depend on what that was
            self.collector.spoil()
            outer.surprises.add(Surprise.UNKNOWN_RUN)

    def backward_ends(self) -> None:
        """The backward is over."""
        self.over = True
        self._owner.step_over(self)

    def later_backward_ends(self) -> None:
        """A later backward through the graph of this step is over."""
        self._owner.later_backward_over(self)

    @property
    def broken(self) -> bool:
        """Whether the backward has begun and has not ended."""
        begun = self.backward.begun or (self.collector is not None and self.collector.in_backward)
        return begun and not self.over

    @property
    def abandoned(self) -> bool:
        """Whether the graphs are gone or the backward broke off, so that the next call of a block
        opens a new step."""
        return self.broken or self.backward.impossible

    # What it tells

    @property
    def observed(self) -> bool:
        return self.decision.observed

    @property
    def trusted(self) -> bool:
        """Whether the step runs under a plan with a trusted prediction."""
        return self.decision.trusted and self.has_plan

    @property
    def tried_blocks(self) -> bool:
        """Whether a block was tried in this step: its immediate recompute adds to the peak."""
        tried, before = self._trials
        return tried is not None and tried.trials != before

    @property
    def ran_as_planned(self) -> bool:
        """Whether the step had as many runs as the plan. Fewer runs need less memory."""
        return self.calls.count - self.calls.unplanned == len(self.plan.choices)

    @property
    def done_plan(self) -> Plan:
        """The plan as it was carried out: evicted runs were recomputed."""
        evicted = None if self.evictor is None else self.evictor.evicted
        if not evicted:
            return self.plan
        choices = {**self._cached.choices, **dict.fromkeys(evicted, Option.RECOMPUTE)}
        return self.decision.with_choices(choices).cached.plan

    @property
    def kept_anything(self) -> bool:
        return bool(self.plan.kept)

    @property
    def comparable(self) -> bool:
        """Whether the real peak can be compared with the predicted one."""
        told = self.has_plan and self.nesting.told_of_others
        return told and not (self.tried_blocks or self.after_broken)

    @property
    def own_peak(self) -> int:
        """The predicted peak of the whole process, without what steps of other handles keep.

        What could be evicted is, rather than exceed what is available.
        """
        rise = self.plan.peak_bytes
        if self.evictor is not None:
            rise = min(rise, self.decision.available_bytes)
        return self.start.in_use + rise

    @property
    def predicted_peak(self) -> int:
        """The predicted peak of the whole process."""
        return max(self.own_peak, self.nesting.others_peak)

    def real_peak(self, end: Reading) -> int | None:
        """The peak of the step; None if an earlier peak was higher and hides it."""
        if self.collector is not None:
            return max(self.collector.readings.peak, end.peak)
        return end.peak if end.peak > self.start.peak else None


class _Beside:
    """Notices when the backward reaches a run that no loss used before."""

    def __init__(self, step: Step, run: Run) -> None:
        self._step = weakref.ref(step)
        self._run = run

    def __call__(self, _: Any, out: Any) -> None:
        """The run has returned."""
        for node in nodes_of(tensors_in(out)):
            node.register_prehook(self._arrives)

    def _arrives(self, *_: Any) -> None:
        step = self._step()
        if step is not None:
            step.is_used(self._run)


def _both(first: _After | None, second: _After | None) -> _After | None:
    """A callable that calls both, in this order."""
    if first is None or second is None:
        return second if first is None else first

    def call(inputs: Any, out: Any) -> None:
        first(inputs, out)
        second(inputs, out)

    return call
