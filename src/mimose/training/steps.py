"""One training step, from its first block's forward to the end of its backward.

The two phases of the paper are two kinds of step: in an `ObservedStep` every block is recomputed
and looked at, or some of each kind are (sheltered execution); in a `PlannedStep` each block does as
the plan says (responsive execution). Which one a batch gets is decided when its first block starts.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mimose.costs import InputSize, Run
from mimose.execution import at_end_of_backward, nodes_of
from mimose.interception import BlockInterceptor, Trials
from mimose.memory import Reading
from mimose.planning import CachedPlan, Plan
from mimose.tensors import keeps_graph, tensors_in
from mimose.training.collector import RecomputeCollector
from mimose.training.correction import Watch


class Step(ABC):
    """What both kinds have in common: how a step begins, is left behind, and ends."""

    alone = True
    """Whether no other handle is attached."""
    interrupted = False
    """Whether the step of another handle, around this one, went on before it was through."""
    interrupts = False
    """Whether it went on itself before one inside of it was."""
    inside: tuple[weakref.ref[Step], ...] = ()
    """Those of other handles that began since it last ran."""

    def __init__(self, size: InputSize, when_over: Callable[[Any], None]) -> None:
        self.size = size
        self.passes = 1
        self.over = False
        self._when_over = when_over
        self.first_block = -1
        """The index of the block that ran first; the next pass begins with it again."""
        self._graphs: list[weakref.ref[_Sentinel]] = []
        self._watch_next = True
        self._in_backward = False
        self.retained = False
        """Whether its graph outlives its backward."""
        self.when_later: Callable[[Any], None] | None = None
        """Called after each further backward through its graph."""
        self._in_later = False

    @abstractmethod
    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        """Whether the coming run of this block is recomputed."""

    @property
    @abstractmethod
    def kept_anything(self) -> bool:
        """Whether some run was to be kept: else it could not have needed less."""

    def model_returns(self, out: Any) -> None:
        """The model's forward is done. Where no block has shown a tensor, its output must do."""
        if self.blind:
            self.watch((), out)
        if not self.alone:
            for node in nodes_of(tensors_in(out)):
                node.register_prehook(self.goes_on)

    def contains(self, step: Step) -> None:
        """The step of another handle begins while this one waits for its backward."""
        self.inside = (*self.inside, weakref.ref(step))

    def goes_on(self, *_: Any) -> None:
        """This step runs on: another block, or its backward."""
        inside, self.inside = self.inside, ()
        for ref in inside:
            step = ref()
            if step is not None and not step.over:
                step.outer_goes_on(self)

    def look_again(self) -> None:  # noqa: B027 (an observed step is looked at already)
        """The next step had better be observed."""

    def outer_goes_on(self, outer: Step) -> None:
        """The step around this one runs again, while this one is open."""
        self.interrupted |= not self._in_backward
        outer.interrupts |= self.interrupted

    @property
    @abstractmethod
    def expected(self) -> InputSize:
        """The size that what is kept was chosen for, with passes that are still to come."""

    def another_pass(self, size: InputSize, *, larger: bool) -> None:
        """One more forward begins before the backward; `larger` than what was expected."""
        self._watch_next = True
        self.passes += 1

    @property
    def abandoned(self) -> bool:
        """Whether its graphs are gone, or its backward broke off: a new step comes then."""
        return self.broken or (
            bool(self._graphs) and all(graph() is None for graph in self._graphs)
        )

    @property
    def blind(self) -> bool:
        """Whether nothing tells when its backward comes, or that it never will."""
        return not self._graphs

    @property
    def broken(self) -> bool:
        """Whether its backward has begun and never ended."""
        return self._in_backward and not self.over

    def watch(self, inputs: Any, out: Any) -> None:
        """Learn from a run's output when the backward comes, and whether it still can."""
        tensor = next((t for t in tensors_in(out) if t.grad_fn is not None), None)
        if tensor is None:
            return
        self._watch_next = False
        sentinel = _Sentinel(self)
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        self._graphs.append(weakref.ref(sentinel))
        for node in nodes_of([tensor]):
            node.register_prehook(sentinel.backward_arrives)

    def backward_arrives(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self.goes_on()
            self.retained = keeps_graph()
            at_end_of_backward(self._end)
        elif self.over and not self._in_later:
            self._in_later = True
            at_end_of_backward(self._later_end)

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self._when_over(self)

    def _later_end(self) -> None:
        self._in_later = False
        if self.when_later is not None:
            self.when_later(self)


class _Sentinel:
    """Lives in a step's graph: dies with it, and hears the backward arrive."""

    __slots__ = ("__weakref__", "_step")

    def __init__(self, step: Step) -> None:
        self._step = step

    def backward_arrives(self, *_: Any) -> None:
        self._step.backward_arrives()


class ObservedStep(Step):
    """Blocks are recomputed, and the collector observes them."""

    def __init__(
        self,
        size: InputSize,
        expected: InputSize,
        collector: RecomputeCollector,
        when_over: Callable[[Any], None],
    ) -> None:
        super().__init__(size, when_over)
        self._expected = expected
        self.collector = collector

    @property
    def expected(self) -> InputSize:
        return self._expected

    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        if self._watch_next:
            interceptor.after = self.watch
        return self.collector.run_begins(interceptor, args, kwargs)

    @property
    def kept_anything(self) -> bool:
        return bool(self.collector.kept)

    @property
    def broken(self) -> bool:
        """Blocks tell of a backward before it comes to the first one's."""
        return super().broken or self.collector.in_backward

    def another_pass(self, size: InputSize, *, larger: bool) -> None:
        """What was to be kept was so for a smaller input than this one."""
        if larger:
            self.collector.keep_no_more()
        self.size = self.size.followed_by(size)
        super().another_pass(size, larger=larger)

    def model_returns(self, out: Any) -> None:
        self.collector.model_returns()
        super().model_returns(out)

    def outer_goes_on(self, outer: Step) -> None:
        super().outer_goes_on(outer)
        if not self.interrupted:
            self.collector.leaves_blocks()
        elif outer.kept_anything:  # levels depend on what that was
            self.collector.spoil()
            outer.look_again()

    def _end(self) -> None:
        if not self.over:
            self.collector.backward_over(retained=self.retained)
        super()._end()


class PlannedStep(Step):
    """Each block does as the plan says; a run that the plan does not know is recomputed."""

    skipped = False
    """Whether runs of the plan were left out."""
    out_of_order = False
    """Whether one came after others that the plan has later."""
    told_of_others = True
    """Whether the steps of other handles that it lies inside of have predictions, too."""
    _coming: Iterator[Run] | None = None
    """The runs that its plan expects, if they are to come in its order."""
    _may_skip = _strict = False
    _others_peak = 0

    def __init__(
        self,
        size: InputSize,
        plan: Plan,
        again: Mapping[Run, bool],
        start: Reading,
        when_over: Callable[[Any], None],
        guarded: Container[Run] = (),
        unused: set[Run] | None = None,
    ) -> None:
        super().__init__(size, when_over)
        self._guarded = guarded
        self._unused = unused or set()
        self.plan = plan
        self.start = start
        self._again = again
        self.corrected = False
        """Whether its plan became stricter while it ran."""
        self.doubtful = False
        """Whether its plan was: then a difference from it says nothing of what is known."""
        self.exact = True
        """Whether its plan's costs are those of its size, not of a larger one."""
        self.later_bytes: int | None = None
        """What its plan leaves for later backwards through its graph; None if none was expected."""
        self.after_broken = False
        """Whether the engine still held memory of a step that broke off, which then dies in it."""
        self.ran_out = False
        """Whether a kept run has run out of memory and was recomputed instead."""
        self.surprised = False
        """Whether a block ran that the plan does not know."""
        self.looked_at = False
        """Whether what is lost between tensors was looked at, if it was to be."""
        self._trials: Trials | None = None
        self._last_run: Run | None = None
        """The run after which the forward is about over, if somebody wants to know."""
        self._when_last: Callable[..., None] | None = None
        self._counts: dict[int, int] = {}
        self._beside = 0
        """Runs that the plan does not know because no loss uses them."""

    @property
    def difference(self) -> float:
        """How far memory in use was from the timeline, where anybody looked."""
        return 0.0

    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        if self._watch_next:
            interceptor.after = self.watch
        index = interceptor.index
        nth = self._counts.get(index, 0)
        again = self._again.get((index, nth))
        if again is not None and self._coming is not None:
            run = index, nth
            if next(self._coming, None) != run and not self._may_follow(run, self._coming):
                again = True
        self._counts[index] = nth + 1
        if self._trials is None:
            self._trials = Trials(interceptor.tried)
        if again is None:
            if (index, nth) in self._unused:
                self._beside += 1
                interceptor.after = _both(interceptor.after, _Beside(self, (index, nth)))
            else:
                self.surprised = not self.ran_out
            return True
        interceptor.guarded = (index, nth) in self._guarded
        if self._last_run == (index, nth) and self._when_last is not None:
            interceptor.after = _both(interceptor.after, self._when_last)
        return again

    def follow_order(self, *, skips: bool) -> None:
        """Its plan holds for runs in this order alone; steps may be known to skip some of them."""
        self._coming, self._may_skip = iter(self._again), skips

    def _may_follow(self, run: Run, coming: Iterator[Run]) -> bool:
        """Another run was expected: whether the plan holds all the same.

        It does where steps are known to skip runs, and this is no more than that. Else this run and
        whatever comes is recomputed: what is kept by then is what the plan had kept by then.
        """
        self.skipped = run in coming  # which takes out of it all that come before
        if self.skipped and self._may_skip:
            return True
        if not self.skipped:
            self.out_of_order, self._coming = True, None
        self.corrected = self._strict = True
        self._again = {
            one: again or self._counts.get(one[0], 0) <= one[1]
            for one, again in self._again.items()
        }
        self.plan = replace(self.plan, recompute=tuple(self._again.values()))
        return False

    @property
    def rehearsed(self) -> bool:
        """Whether a block was tried: recomputed at once, with its own peak."""
        return self._trials is not None and self._trials.any_since

    @property
    def _last_planned(self) -> Run | None:
        *_, last = (None, *self._again)
        return last

    @property
    def forward_is_over(self) -> bool:
        """Whether no more passes are expected, as far as one can tell."""
        last = self._last_planned
        return last is not None and self._counts.get(last[0], 0) > last[1]

    def when_forward_is_over(self, call: Callable[..., None]) -> None:
        """Call this after the last block, where the model itself is not called."""
        self._last_run, self._when_last = self._last_planned, call

    def is_used(self, run: Run) -> None:
        """The backward comes to a run that no loss was known to use: no plan knows it."""
        self._unused.discard(run)
        self.surprised = not self.ran_out

    def recompute_the_rest(self) -> None:
        """A kept run has run out of memory: whatever comes is recomputed."""
        self.ran_out = self.corrected = True
        self._again = {}

    @property
    def expected(self) -> InputSize:
        return self.size

    def another_pass(self, size: InputSize, *, larger: bool) -> None:
        """A larger second input than the plan was made for: from here on, everything again."""
        if larger:
            self._again = {}
        super().another_pass(size, larger=larger)

    @property
    def choices_so_far(self) -> tuple[bool, ...] | None:
        """What its runs did until now; None if they did not come in the order of the plan."""
        done = [self._counts.get(block, 0) > nth for block, nth in self._again]
        ran = done.index(False) if False in done else len(done)
        return None if any(done[ran:]) else tuple(self._again.values())[:ran]

    def plan_rest(self, size: InputSize, cached: CachedPlan) -> None:
        """The next pass has shown how large the step is: runs still to come have another plan."""
        self.size, self.plan = size, cached.plan
        self._again, self._guarded = cached.again, cached.guarded
        if self._coming is not None:
            done = [run for run in self._again if self._counts.get(run[0], 0) > run[1]]
            self._coming = iter(tuple(self._again)[len(done) :])
        self.exact, self.doubtful = cached.exact, self.doubtful or cached.doubtful

    @property
    def ran_as_planned(self) -> bool:
        """Whether it had as many runs as its plan knows: fewer need less."""
        return sum(self._counts.values()) - self._beside == len(self.plan.recompute)

    @property
    def kept_anything(self) -> bool:
        return bool(self.plan.kept)

    @property
    def comparable(self) -> bool:
        """Whether its peak tells how good its prediction was, if it had one."""
        predicted = bool(self.plan.recompute) and self.told_of_others
        return predicted and not (self.rehearsed or self.after_broken)

    @property
    def own_peak(self) -> int:
        """The predicted peak of the whole process, if no other handle's step keeps anything."""
        return self.start.in_use + self.plan.peak_bytes

    @property
    def predicted_peak(self) -> int:
        """The predicted peak of the whole process."""
        return max(self.own_peak, self._others_peak)

    @property
    def peaks_with_others(self) -> bool:
        """Whether the predicted peak is that of another handle's step."""
        return self._others_peak > self.own_peak

    def expect(self, peak_bytes: int) -> None:
        """Another handle's step that is open at the same time is to peak there."""
        self._others_peak = max(self._others_peak, peak_bytes)

    def look_again(self) -> None:
        self.surprised = not self.ran_out

    def real_peak(self, end: Reading) -> int | None:
        """The step's peak, as far as one can see it: if it is higher than what was before."""
        return end.peak if end.peak > self.start.peak else None


class _Beside:
    """Hears the backward come to a run that no loss was known to use."""

    def __init__(self, step: PlannedStep, run: Run) -> None:
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


def _both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    """One after the other."""
    if first is None:
        return second

    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call


class WatchedStep(PlannedStep):
    """A planned step whose plan becomes stricter when memory runs ahead of the timeline."""

    def __init__(self, *args: Any, watch: Watch) -> None:
        super().__init__(*args)
        self._timeline = watch
        self._pattern = tuple(self._again)
        self._positions = {run: position for position, run in enumerate(self._pattern)}

    @property
    def difference(self) -> float:
        return self._timeline.difference

    def plan_rest(self, size: InputSize, cached: CachedPlan) -> None:
        super().plan_rest(size, cached)
        if cached.profile is not None:
            self._timeline = self._timeline.of_plan(cached.profile, cached.plan)

    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        position = self._positions.get((interceptor.index, self._counts.get(interceptor.index, 0)))
        if position is not None and self._again and not self._strict:
            choices = self._timeline.before_run(position, args, kwargs)
            if choices is not None:
                self._again = dict(zip(self._pattern, choices, strict=True))
                self.plan = replace(self.plan, recompute=choices)
                self.corrected = True
        return super().recompute(interceptor, args, kwargs)
