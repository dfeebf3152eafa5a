"""Find out in a trial whether a block can be recomputed, and what its recompute must restore.

The first time that a block is to be recomputed, it is run, recomputed at once and compared.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mimose.costs import Option
from mimose.errors import ConflictError, RecomputeError
from mimose.execution import (
    ArgumentCopies,
    AttributeSnapshot,
    BeforeForward,
    BufferSnapshot,
    CollectivesIssued,
    DryRun,
    Entry,
    FirstRunObserver,
    Frame,
    Hook,
    HookWatch,
    NewChanges,
    RunAsFound,
    StateBeforeForward,
    all_buffer_slots,
    foreign_hooks,
    is_distributed,
    parameter_slots,
    refuses_hooks,
    run_with,
    run_with_former,
    swapped_parameters,
    top_hooks,
)
from mimose.interception.block_kind import kind_of
from mimose.interception.directive import Directive
from mimose.interception.other_offloading import name_of_hooks
from mimose.interception.tried import CHANGED_LATER, Waiting
from mimose.interception.verdict import JudgedInterceptor
from mimose.tensors import is_out_of_memory, release_traceback

_REFUSES_HOOKS = (
    "calls torch.func.grad, torch.func.vjp or other code that does not work while mimose observes "
    "what the block saves for its backward"
)
_MOST_ATTEMPTS = 3
"""How many trials of a block may fail for lack of memory before it is trusted untested."""


class _BrokenOff(NamedTuple):
    """A forward that failed, was undone, and can run again in another way."""

    out_of_memory: bool
    """Whether memory ran out; else it refuses hooks."""
    args: Any
    kwargs: Any


class TriedInterceptor(JudgedInterceptor):
    """An interceptor that can run its block recomputed, with a trial in the first such call."""

    __slots__ = ()

    @property
    def copies_caches(self) -> bool:
        """Whether caches among the arguments of a call that may fail are the call's own."""
        return False

    def checkpointed(
        self,
        directive: Directive,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        may_fail: bool,
    ) -> Any:
        """Run `function`, the block's forward, so that its activations can be recomputed.

        With `Option.KEEP` the activations are kept until evicted; otherwise they are not kept.
        If memory runs out and the function `may_fail`, room is made and it runs once more.
        """
        given = ArgumentCopies.of(args, kwargs)
        if given is not None and given.problem is not None:
            self.distrust(given.problem)
            return self._run_examined(function, args, kwargs)
        rebuilt = self.build is not None and not self.build.unchanged
        if rebuilt and self.collective_ranks:  # the others would not take part in a trial
            self._settle(self.changing, self.side_effects)
            rebuilt = False
        if self.trusted is None or rebuilt:
            return self._run_trial(directive, function, args, kwargs, given, may_fail=may_fail)
        if top_hooks() is not None:  # another checkpoint around it may begin in any step
            self._refuse_foreign_hooks()
        exchanged = swapped_parameters(self.parameters)
        state_before = self._before()
        attributes_before = self._attributes_before()
        too_large = attributes_before is not None and attributes_before.too_large - self.large
        if too_large and not self.collective_ranks:
            return self._run_trial(directive, function, args, kwargs, given, may_fail=may_fail)
        buffers = BufferSnapshot(self.changing) if self.changing else None
        found = _as_found(exchanged, buffers, attributes_before, given)
        keeping = directive.option is Option.KEEP
        own = (args, kwargs) if given is None else (given.args, given.kwargs)
        frame = self._frame(directive, function, *own, found=found, keeping=keeping)
        before = BeforeForward.of_frame(frame, buffers, given, attributes_before, state_before)
        with self._watching_hooks(attributes_before):
            out, broken_off = self._attempt(
                frame.forward, args, kwargs, before, may_fail=may_fail, directive=directive
            )
        if broken_off is not None:
            args, kwargs = broken_off.args, broken_off.kwargs
            if not broken_off.out_of_memory:
                return function(*args, **kwargs)
            self.memory_ran_out()
            again = recomputed_instead(directive)
            return self.checkpointed(again, function, args, kwargs, may_fail=False)
        if not self._keep_if_arguments_changed(given, frame):
            self._hold_or_move(directive, frame)
            self._note_changes(state_before, frame, out, attributes_before)
        return out

    @contextmanager
    def _watching_hooks(self, before: AttributeSnapshot | None) -> Iterator[None]:
        """Let recomputes call hooks that only observed so far, and act in this forward."""
        passive = self.side_effects.passive_hooks
        if before is None or not passive or self.compiled is not None:
            yield
            return
        watch = HookWatch()
        with watch.watching({module for module, _ in passive}):
            yield
        self._do_not_skip(watch.acting.intersection(passive), before)

    def _skip_no_pre_hooks(self, before: AttributeSnapshot) -> None:
        """Let recomputes call all forward pre-hooks: one may set what the forward has changed."""
        passive = self.side_effects.passive_hooks
        self._do_not_skip({(m, key) for m, key in passive if key in m._forward_pre_hooks}, before)

    def _do_not_skip(self, hooks: Collection[Hook], before: AttributeSnapshot) -> None:
        """Let recomputes call these hooks: that of the forward in progress, and those to come."""
        if hooks:
            before.do_not_skip(hooks)
            passive = self.side_effects.passive_hooks
            still = tuple(hook for hook in passive if hook not in hooks)
            self.side_effects = self.side_effects._replace(passive_hooks=still)

    def _hold_or_move(self, directive: Directive, frame: Frame) -> None:
        """Do with the activations of a forward what its directive says."""
        frame.evictable = directive.option is Option.KEEP
        if not frame.evictable:
            _move_arguments(directive, frame)
        elif directive.evictor is not None and not self.collective_ranks:
            directive.evictor.hold(directive.run, frame)

    def _note_changes(
        self,
        state_before: StateBeforeForward,
        frame: Frame,
        out: Any,
        attributes_before: AttributeSnapshot | None,
    ) -> None:
        """Let recomputes find what the forward has found, and restore what it has changed."""
        new_changes = state_before.new_changes()
        if new_changes is not None:
            if new_changes.attributes and attributes_before is not None:
                self._skip_no_pre_hooks(attributes_before)
            self._handle_new_changes(new_changes, frame, out)
        # Last: what the forward is known to change is put in place inside of this.
        frame.found += (state_before.for_recompute(self.tried.first_node),)

    def _run_examined(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block that is kept from now on, and find out once what its forward changes."""
        if self.examined:
            return function(*args, **kwargs)
        buffers = BufferSnapshot(all_buffer_slots(self.module))
        observer = FirstRunObserver(self.module)
        out = function(*args, **kwargs)
        buffers.add_new_buffers(self.module)
        self.examine(buffers, observer.side_effects())
        return out

    def _keep_if_arguments_changed(self, given: ArgumentCopies | None, frame: Frame) -> bool:
        """Keep the block for good if its forward changed an argument. Returns whether it did."""
        changed = None if given is None else given.changed()
        if changed is None:
            return False
        self.distrust(f"it changes its arguments ({changed})")
        if frame.keeping:
            frame.keep()
        return frame.keeping

    def _handle_new_changes(self, changes: NewChanges, frame: Frame, out: Any) -> None:
        """Make recomputes, of this forward and of later ones, restore what it has begun to change.

        If an old value is lost, raise unless a dry run succeeds without it.
        """
        if changes.parameter:
            self._keep_if_parameters_change(changes.parameter, frame)
            return
        buffers, attributes = changes.slots
        old = BufferSnapshot.of(changes.buffers), AttributeSnapshot(changes.attributes)
        frame.found += tuple(snapshot.run for snapshot in old)
        if changes.lost:
            problem = frame.dry_run(out, count_operators=False).problem
            if problem is not None:
                raise RecomputeError(
                    f"block {self.name!r} has begun to change {changes.lost!r} in place. The "
                    "earlier value of this large tensor is lost, and with the present one the "
                    f"block cannot be recomputed: {problem}. exclude={self.name!r} keeps the block"
                )
        side_effects = self.side_effects._replace(
            attributes=(*self.side_effects.attributes, *attributes)
        )
        self._settle(self.changing + buffers, side_effects)

    def _keep_if_parameters_change(self, name: str, frame: Frame) -> None:
        """Keep the block for good: recomputes would change its parameter again.

        Raise if the activations of this forward are gone.
        """
        if not frame.keeping:
            raise RecomputeError(
                f"block {self.name!r} has begun to change or replace its parameter {name!r} in its "
                "forward. Its recompute would do so again, so this step is lost. "
                f"exclude={self.name!r} keeps the block from the first step on"
            )
        frame.keep()
        self.distrust(f"it changes its parameter {name!r} in its forward")

    def _run_trial(
        self,
        directive: Directive,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        given: ArgumentCopies | None,
        *,
        may_fail: bool,
    ) -> Any:
        """Run the block, recompute it at once and compare, to detect if it cannot be recomputed."""
        self._refuse_foreign_hooks()
        if type(self.module) in self.tried.changed_later:
            self.distrust(CHANGED_LATER)
            return self._run_examined(function, args, kwargs)
        self.tried.trials += 1
        buffers = BufferSnapshot(all_buffer_slots(self.module))
        observer = FirstRunObserver(self.module)
        exchanged = swapped_parameters(parameter_slots(self.module))
        own_args, own_kwargs = (args, kwargs) if given is None else (given.args, given.kwargs)
        frame = self._frame(directive, function, own_args, own_kwargs, keeping=True)
        before = BeforeForward.of_frame(frame, buffers, given, observer, None)
        with observer.watching_hooks():
            out, broken_off = self._attempt(frame.forward, args, kwargs, before, may_fail=may_fail)
        if broken_off is not None:
            return self._run_examined(function, broken_off.args, broken_off.kwargs)
        buffers.add_new_buffers(self.module)
        side_effects, changed = observer.side_effects(), observer.irreversible_change
        self.examine(buffers, side_effects)
        if self._keep_if_arguments_changed(given, frame):
            return out
        attributes_before = observer.snapshot(side_effects)
        self.large = self.large | attributes_before.too_large
        unchanged = observer.unchanged(side_effects)
        frame.found = (
            *_as_found(exchanged, buffers, attributes_before, given),
            functools.partial(run_with_former, unchanged),
        )
        alone = changed is None and not self.calls_buffers
        kind = self._kind(frame) if alone and not side_effects else None
        if kind is not None and kind in self.tried.kinds:
            frame.evict()
            _move_arguments(directive, frame)
            self.trust()
        elif changed is not None:  # a recompute would change it again
            frame.keep()
            self.distrust(f"it changes {changed}")
        elif self.calls_buffers:  # which nobody has looked at
            frame.keep()
            self.distrust("it calls another block, which has buffers")
        else:
            self._compare(directive, frame, out, given, kind)
        return out

    def _compare(
        self,
        directive: Directive,
        frame: Frame,
        out: Any,
        given: ArgumentCopies | None,
        kind: Hashable | None,
    ) -> None:
        """Recompute the block at once, and decide by the result whether to trust it."""
        dry_run = self._dry_run(frame, out)
        if dry_run is None:
            _move_arguments(directive, frame)  # memory is short; nothing is kept
            self._count_failed_trial()
        elif dry_run.problem is not None:
            frame.keep()
            self.distrust(dry_run.problem)
        else:
            self._remember_trial(dry_run, kind)
            self.trust()
            if self.comes_last:  # no block follows; the rest of the forward may need the memory
                frame.evict()
            else:
                self.tried.waiting = Waiting(self, frame, given)

    def _attempt(
        self,
        forward: Callable[[Any, Any], Any],
        args: Any,
        kwargs: Any,
        before: BeforeForward | None,
        *,
        may_fail: bool,
        directive: Directive | None = None,
    ) -> tuple[Any, _BrokenOff | None]:
        """The output of a forward, or why it failed if it was undone and may run again.

        That includes running out of memory if the call `may_fail` and has a directive.
        """

        def put_back() -> tuple[Any, Any] | None:
            if before is None:
                return None
            return before.put_back(args, kwargs, own_caches=may_fail and self.copies_caches)

        handled = sys.exc_info()[1]  # the caller's, and not ours to clear
        try:
            return forward(args, kwargs), None
        except RuntimeError as error:
            if refuses_hooks(error):
                again = self._distrusted_with_hooks(error, put_back())
                return None, _BrokenOff(False, *again)
            if directive is None or not may_fail or not is_out_of_memory(error):
                raise
            if self.collective_ranks or (undone := put_back()) is None or not _made_room(directive):
                raise
            release_traceback(error, keep=handled)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return None, _BrokenOff(True, *undone)

    def memory_ran_out(self) -> None:
        """Called when memory ran out in a forward of the block, which runs again, recomputed."""

    def _distrusted_with_hooks(
        self, error: RuntimeError, undone: tuple[Any, Any] | None
    ) -> tuple[Any, Any]:
        """Keep a block whose forward refuses saved-tensor hooks. Returns its arguments.

        Raises an error if there are none with which it can run again, now without hooks.
        """
        if undone is not None:
            self.distrust(f"it {_REFUSES_HOOKS}")
            return undone
        self.trusted = False
        raise ConflictError(
            f"block {self.name!r} {_REFUSES_HOOKS}. Before that, it may have changed an argument "
            "or a state of its modules, so it cannot run again and this step is lost. "
            f"exclude={self.name!r} keeps the block from the first step on"
        ) from error

    def _count_failed_trial(self) -> None:
        """After `_MOST_ATTEMPTS` attempts without memory, trust the block untested.

        Each recompute still checks what it saves.
        """
        self.attempts += 1
        if self.attempts == _MOST_ATTEMPTS:
            self.trust()
            self.tried.tell(
                self,
                "is too large to be tried: its activations do not fit into memory twice. It is "
                "recomputed without checking that its outputs equal those of the forward",
            )

    def _dry_run(self, frame: Frame, out: Any) -> DryRun | None:
        """Recompute and compare; None if memory ran out, so that the next run is tried again."""
        collectives = CollectivesIssued()
        count = self.compiled is None and type(self.module) not in self.tried.stops
        try:
            dry_run = frame.dry_run(out, count_operators=count)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        self.collective_ranks = collectives.ranks()
        return dry_run

    def _remember_trial(self, dry_run: DryRun, kind: Hashable | None) -> None:
        """Record a successful trial, for other blocks of the same class or kind."""
        # An early stop raises an exception (tens of microseconds): use it only if operators follow.
        if dry_run.operators_after_last is not None:
            self.tried.stops[type(self.module)] = dry_run.operators_after_last != 0
        if kind is not None:
            self.tried.kinds.add(kind)

    def _kind(self, frame: Frame) -> Hashable | None:
        """A key shared by blocks for which one trial is enough.

        None if this block must be tried itself.
        """
        # With several ranks every block is tried, to find the collectives that it issues.
        if self.compiled is not None or is_distributed():
            return None
        kind = kind_of(self.module)
        if kind is None:
            return None
        frame.note_kinds()
        return kind, tuple(frame.saved.shapes), tuple(frame.saved.dtypes)

    def _frame(
        self,
        directive: Directive,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        **options: Any,
    ) -> Frame:
        evictor, listener = directive.evictor, directive.listener
        measured = listener is not None and listener.measures
        return Frame(
            function,
            args,
            kwargs,
            name=f"block {self.name!r}",
            run=directive.run,
            listener=listener,
            make_room=None if evictor is None else evictor.make_room,
            # A measured recompute must run to its end: its peak stands for the whole forward.
            early_stop=self.early_stop and not measured,
            **options,
        )

    def _refuse_foreign_hooks(self) -> None:
        hooks = foreign_hooks()
        if hooks:
            raise ConflictError(
                f"block {self.name!r} runs under saved-tensor hooks, so other code already moves "
                "or checkpoints its activations, and a plan could not decide about them. It is "
                f"{name_of_hooks(hooks)}, or do not attach mimose to this model"
            )


def _as_found(
    exchanged: list[Entry],
    buffers: BufferSnapshot | None,
    attributes: AttributeSnapshot | None,
    given: ArgumentCopies | None,
) -> list[RunAsFound]:
    """What lets a recompute find the state before its forward."""
    found: list[RunAsFound] = [functools.partial(run_with, exchanged)] if exchanged else []
    return found + [state.run for state in (buffers, attributes, given) if state is not None]


def recomputed_instead(directive: Directive) -> Directive:
    """How a call runs that ran out of memory."""
    return replace(directive, option=Option.RECOMPUTE, evictor=None)


def _made_room(directive: Directive) -> bool:
    """Evict activations; whether the call needs less memory now if it is recomputed."""
    freed = directive.evictor is not None and directive.evictor.make_room()
    return freed or not directive.option.recomputes


def _move_arguments(directive: Directive, frame: Frame) -> None:
    """Move arguments to the host until the recompute, if the directive's option says so."""
    if directive.mover is not None and directive.option is Option.RECOMPUTE_FROM_HOST:
        directive.mover.move_arguments(frame)
