"""What a block's first run shows: whether it can be recomputed, and what that takes.

The first time that a block is to be recomputed it is tried: run, recomputed at once and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from mimose.costs import Option
from mimose.errors import ConflictError, RecomputeError
from mimose.execution import (
    ArgumentCopies,
    AttributeSnapshot,
    BufferSnapshot,
    CollectivesIssued,
    DryRun,
    FirstRunObserver,
    Frame,
    NewChanges,
    SideEffects,
    SwappedParameters,
    all_buffer_slots,
    foreign_hooks,
    is_distributed,
    parameter_slots,
)
from mimose.interception.block_kind import kind_of
from mimose.interception.directive import Directive
from mimose.interception.found import SeveralFound, found_as_one
from mimose.interception.other_offloading import name_of_hooks
from mimose.interception.tried import CHANGED_LATER, Waiting
from mimose.interception.verdict import JudgedInterceptor
from mimose.tensors import is_out_of_memory

_MOST_ATTEMPTS = 3
"""How often a block is tried for which there is no memory."""


class TriedInterceptor(JudgedInterceptor):
    """An interceptor that can run its block recomputed, and tries that on the first call."""

    __slots__ = ()

    def checkpointed(
        self, directive: Directive, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run this function of the block so that its activations can be recomputed.

        They are kept until they are evicted if that is the directive's option, else not at all.
        """
        given = ArgumentCopies.of(args, kwargs)
        if given is not None and given.problem is not None:
            self.distrust(given.problem)
            return function(*args, **kwargs)
        rebuilt = self.build is not None and not self.build.unchanged
        if self.trusted is None or rebuilt:
            return self._first_time(directive, function, args, kwargs, given)
        exchanged, attributes_before = (
            SwappedParameters.among(self.parameters),
            self._attributes_before(),
        )
        if attributes_before is not None and attributes_before.too_large - self.large:
            return self._first_time(directive, function, args, kwargs, given)
        found = found_as_one(exchanged, self.changing, attributes_before, given)
        moment = self._before()
        keeping = directive.option is Option.KEEP
        own = (args, kwargs) if given is None else (given.args, given.kwargs)
        # Until it is known that the forward leaves objects among its arguments alone, it is kept.
        held = keeping or given is not None
        frame = self._frame(directive, function, *own, found=found, keeping=held)
        out = frame.forward(args, kwargs)
        if self._changed(given, frame):
            return out
        frame.evictable = keeping
        if not keeping:
            frame.evict()
            _move_arguments(directive, frame)
        elif directive.evictor is not None and not self.collective_ranks:
            directive.evictor.hold(directive.run, frame)
        begun = moment.new_changes()
        if begun is not None:
            self._begins_to_change(begun, frame, out)
        return out

    def _changed(self, given: ArgumentCopies | None, frame: Frame) -> bool:
        """Whether the forward has changed an object that it was given: the block is kept then."""
        changed = None if given is None else given.changed()
        if changed is None:
            return False
        frame.keep()
        self.distrust(f"it changes what it is given ({changed})")
        return True

    def _begins_to_change(self, begun: NewChanges, frame: Frame, out: Any) -> None:
        """The recompute of this forward finds the old values, those of later ones find theirs."""
        buffers, attributes = begun.slots
        old = BufferSnapshot.of(begun.buffers), AttributeSnapshot(begun.attributes)
        frame.found = SeveralFound((frame.found, *old))
        if begun.lost:
            problem = frame.dry_run(out, count_operators=False).problem
            if problem is not None:
                raise RecomputeError(
                    f"block {self.name!r} has begun to change {begun.lost!r} in place, a large "
                    "tensor that it had left alone, and cannot be recomputed from what it is now: "
                    f"{problem}. exclude={self.name!r} keeps the block"
                )
        side_effects = self.side_effects._replace(
            attributes=(*self.side_effects.attributes, *attributes)
        )
        self._settle(self.changing + buffers, side_effects)

    def _first_time(
        self,
        directive: Directive,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        given: ArgumentCopies | None,
    ) -> Any:
        """Run, recompute at once and compare: what cannot be recomputed is found out here."""
        self._refuse_foreign_hooks()
        if type(self.module) in self.tried.changed_later:
            self.distrust(CHANGED_LATER)
            return function(*args, **kwargs)
        self.tried.trials += 1
        buffers, look = BufferSnapshot(all_buffer_slots(self.module)), FirstRunObserver(self.module)
        exchanged = SwappedParameters.among(parameter_slots(self.module))
        own_args, own_kwargs = (args, kwargs) if given is None else (given.args, given.kwargs)
        frame = self._frame(directive, function, own_args, own_kwargs, keeping=True)
        with look.watching_hooks():
            out = frame.forward(args, kwargs)
        if self._changed(given, frame):
            return out
        buffers.add_new_buffers(self.module)
        side_effects, changed = look.side_effects(), look.irreversible_change
        attributes_before = look.snapshot(side_effects)
        self.large = self.large | attributes_before.too_large
        frame.found = SeveralFound((exchanged, buffers, attributes_before, given))
        kind = None if side_effects or changed is not None else self._kind(frame)
        if kind is not None and kind in self.tried.kinds:
            frame.evict()
            _move_arguments(directive, frame)
            self.trust(buffers, side_effects)
        elif changed is not None:  # a second run would change it again
            frame.keep()
            self.distrust(f"it changes {changed}")
        else:
            dry_run = self._dry_run(frame, out)
            if dry_run is None:
                _move_arguments(directive, frame)  # memory is short
                self._could_not_try(buffers, side_effects)
            elif dry_run.problem is not None:
                frame.keep()
                self.distrust(dry_run.problem)
            else:
                self._remember_trial(dry_run, kind)
                self.trust(buffers, side_effects)
                if self.comes_last:  # what follows may be large
                    frame.evict()
                else:
                    self.tried.waiting = Waiting(self, frame, given)
        return out

    def _could_not_try(self, buffers: BufferSnapshot, side_effects: SideEffects) -> None:
        """Without memory to try it again and again, what a recompute checks anyway must do."""
        self.attempts += 1
        if self.attempts == _MOST_ATTEMPTS:
            self.trust(buffers, side_effects)
            self.tried.tell(
                self,
                "is too large to be tried: its activations do not fit into memory twice. It is "
                "recomputed without comparing the results with those of its forward",
            )

    def _dry_run(self, frame: Frame, out: Any) -> DryRun | None:
        """How a recompute goes; None without memory to try: the next run is tried again then."""
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
        """What went well holds for others of the kind."""
        # Stopping takes an exception, tens of microseconds: only where it spares something.
        if dry_run.operators_after_last is not None:
            self.tried.stops[type(self.module)] = dry_run.operators_after_last != 0
        if kind is not None:
            self.tried.kinds.add(kind)

    def _kind(self, frame: Frame) -> Hashable | None:
        """What tells whether another block's verdict holds for this one; None if none can."""
        # Where several ranks train, each block finds out for itself which collectives it issues.
        if self.compiled is not None or is_distributed():
            return None
        kind = kind_of(self.module)
        return (
            None if kind is None else (kind, tuple(frame.saved.shapes), tuple(frame.saved.dtypes))
        )

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
            # Who measures wants to see the peak of the whole forward.
            early_stop=self.early_stop and not measured,
            **options,
        )

    def _refuse_foreign_hooks(self) -> None:
        hooks = foreign_hooks()
        if hooks:
            raise ConflictError(
                f"block {self.name!r} runs under saved-tensor hooks, so its activations are "
                "already moved or checkpointed by something else, which a plan would have to "
                f"decide. It is {name_of_hooks(hooks)}, or do not attach mimose to this model"
            )


def _move_arguments(directive: Directive, frame: Frame) -> None:
    """Let arguments wait on the host until the recompute, if that is the directive's option."""
    if directive.mover is not None and directive.option is Option.RECOMPUTE_FROM_HOST:
        directive.mover.move_arguments(frame)
