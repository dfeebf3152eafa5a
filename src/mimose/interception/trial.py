"""What a block's first run shows: whether it can be recomputed, and what that takes.

The first time that a block is to be recomputed it is tried: run, recomputed at once and compared.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from mimose.costs import Option
from mimose.errors import ConflictError, RecomputeError, warn
from mimose.execution import (
    ArgumentCopies,
    AttributeSnapshot,
    BufferSlot,
    BufferSnapshot,
    ChangeDetector,
    CollectivesIssued,
    DryRun,
    FirstRunObserver,
    Found,
    Frame,
    ModuleStructure,
    NewChanges,
    SideEffects,
    StateBeforeForward,
    SwappedParameters,
    all_buffer_slots,
    foreign_hooks,
    is_distributed,
    norm_buffers,
    parameter_slots,
)
from mimose.interception.block_kind import kind_of
from mimose.interception.blocks import Block
from mimose.interception.directive import Directive
from mimose.interception.interceptor import Interceptor
from mimose.interception.other_offloading import name_of_hooks
from mimose.tensors import is_out_of_memory

log = logging.getLogger("mimose")

_MOST_ATTEMPTS = 3
"""How often a block is tried for which there is no memory."""


_CHANGED_LATER = "the model changes one of its arguments in place after its run"


class Tried:
    """What the first runs of a model's blocks have shown that holds for others of their kind."""

    def __init__(self) -> None:
        self.stops: dict[type[nn.Module], bool] = {}
        """Whether an early stop spares anything, by kind of block: counting is slow."""
        self.trials = 0
        """How many runs of blocks were trials so far: memory in these is no measure."""
        self.kinds: set[Hashable] = set()
        """What was recomputed and compared: how a block is made, and what its forward saved."""
        self.changed_later: set[type[nn.Module]] = set()
        """The classes of blocks whose arguments are changed in place after their run."""
        self.waiting: Waiting | None = None
        self.classes: Counter[type[nn.Module]] = Counter()
        """How many blocks there are of each class."""
        self._told: set[tuple[type[nn.Module], str]] = set()

    def tell(self, block: TriedInterceptor, what: str, remedy: str = "") -> None:
        """Warn of a block; of others of its class of which the same is to be said, only log it."""
        kind = type(block.module)
        if (kind, what) in self._told:
            log.info("mimose: block %r %s", block.name, what)
            return
        self._told.add((kind, what))
        others = self.classes[kind] - 1
        alike = f". The log names which of the {others} other {kind.__name__} are the same (INFO)"
        warn(f"block {block.name!r} {what}{remedy}{alike if others else ''}")


class Trials:
    """Whether any block is tried from now on."""

    __slots__ = ("_before", "_tried")

    def __init__(self, tried: Tried) -> None:
        self._tried, self._before = tried, tried.trials

    @property
    def any_since(self) -> bool:
        return self._tried.trials != self._before


class Waiting:
    """A block that was tried: its activations stay until the next block runs.

    Only then is it seen whether the model changes its arguments in place after its run (a state
    that is carried along): it could not be recomputed from them.
    """

    def __init__(
        self, interceptor: TriedInterceptor, frame: Frame, given: ArgumentCopies | None
    ) -> None:
        self._seat, self._frame = weakref.ref(interceptor), weakref.ref(frame)
        self._given = None if given is None else weakref.ref(given)

    def settle(self) -> None:
        """The next block begins to run."""
        interceptor, frame = self._seat(), self._frame()
        if interceptor is None:
            return
        interceptor.tried.waiting = None
        if frame is None:  # the step is over, or was given up
            return
        given = None if self._given is None else self._given()
        if frame.saved_arguments.changed or (given is not None and given.tensors_changed):
            frame.keep()
            interceptor.tried.changed_later.add(type(interceptor.module))
            interceptor._distrust(_CHANGED_LATER)
        else:
            frame.evict()


class TriedInterceptor(Interceptor):
    """An interceptor that can run its block recomputed, and tries that on the first call."""

    __slots__ = (
        "attempts",
        "build",
        "changing",
        "collective_ranks",
        "comes_last",
        "early_stop",
        "large",
        "later",
        "name",
        "parameters",
        "side_effects",
        "tried",
        "trusted",
    )

    def __init__(self, block: Block, tried: Tried) -> None:
        super().__init__(block.module)
        self.name = block.name
        self.tried = tried
        tried.classes[type(block.module)] += 1
        self.trusted: bool | None = None
        """Whether it can be recomputed; not known before its first run."""
        self.attempts = 0
        """How often there was no memory to try it."""
        self.early_stop = True
        self.changing: list[BufferSlot] = []
        """The buffers that its forward changes."""
        self.side_effects = SideEffects()
        self.build: ModuleStructure | None = None
        """How it was made when it was tried."""
        self.later: ChangeDetector | None = None
        """Looks at what it has left alone so far."""
        self.large: set[tuple[int, str]] = set()
        """Attributes with which it was tried though their values are too large to be kept."""
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.comes_last = False
        """Whether it is the last block of its model."""
        self.collective_ranks: frozenset[int] = frozenset()
        """The ranks that take part in collectives of its forward, found out on its first run."""

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What its first run has shown, in plain values; None if it has not run, or is gone."""
        module = self._module()
        if self.trusted is None or module is None or not self.side_effects.only_on_modules:
            return None
        names = {id(m): name for name, m in module.named_modules()}

        def named(places: Iterable[BufferSlot]) -> list[list[str]]:
            return [[names[id(m)], name] for m, name in places if id(m) in names]

        return {
            "trusted": self.trusted,
            "early_stop": self.early_stop,
            "changing": named(self.changing),
            "traces": named(self.side_effects.attributes),
            "draws": self.side_effects.draws,
        }

    def adopt(self, verdict: Mapping[str, Any]) -> None:
        """Take over the verdict of an earlier run of the same model: no need to try again.

        Unless it draws from generators of its own, or has hooks inside that must run first.
        """
        parts = dict(self.module.named_modules())
        inside = [part for name, part in parts.items() if name]
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in inside)
        if hooked or verdict.get("draws", False):
            return
        changing = [(parts[str(at)], str(name)) for at, name in verdict["changing"]]
        left = [(parts[str(at)], str(name)) for at, name in verdict.get("traces", ())]
        self._settle(changing, SideEffects(tuple(left)))
        self.early_stop = bool(verdict["early_stop"])
        self.trusted = bool(verdict["trusted"])

    def _settle(self, changing: list[BufferSlot], side_effects: SideEffects) -> None:
        self.changing, self.side_effects = changing, side_effects
        self.parameters = parameter_slots(self.module)
        self.build = ModuleStructure(self.module)
        self._look_for_more()

    def _look_for_more(self) -> ChangeDetector:
        known = {(id(module), name) for module, name in self.changing}
        places = all_buffer_slots(self.module)
        quiet = [(module, name) for module, name in places if (id(module), name) not in known]
        self.later = ChangeDetector(self.module, self.side_effects.attributes, quiet)
        return self.later

    def move_to(self, module: nn.Module) -> None:
        """Another module has taken the block's place: nothing is known of it."""
        self.remove()
        self._module = weakref.ref(module)
        self.trusted, self.attempts, self.early_stop = None, 0, True
        self.changing, self.parameters, self.side_effects = [], [], SideEffects()
        self.build = self.later = None
        self.large = set()
        self.install()

    def let_go(self) -> None:
        """Hold on to no module, no parameter and no step any more."""
        self.changing, self.parameters, self.side_effects = [], [], SideEffects()
        self.build = self.later = None
        self.tried = Tried()

    def follow(self, trusted: bool | None) -> None:
        """Take over what another rank has found: that it cannot be recomputed, or must be tried."""
        self.trusted = trusted

    def checkpointed(
        self, directive: Directive, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run this function of the block so that its activations can be recomputed.

        They are kept until they are evicted if that is the directive's option, else not at all.
        """
        given = ArgumentCopies.of(args, kwargs)
        if given is not None and given.problem is not None:
            self._distrust(given.problem)
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
        found = _as_one(exchanged, self.changing, attributes_before, given)
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

    def _attributes_before(self) -> AttributeSnapshot | None:
        return AttributeSnapshot.before_forward(self.side_effects) if self.side_effects else None

    def _before(self) -> StateBeforeForward:
        """What a forward that begins now finds of what no forward has changed yet."""
        if self.later is None or not self.later.up_to_date:
            return self._look_for_more().before_forward()
        try:
            return self.later.before_forward()
        except KeyError:  # an attribute went as another one came
            return self._look_for_more().before_forward()

    def _changed(self, given: ArgumentCopies | None, frame: Frame) -> bool:
        """Whether the forward has changed an object that it was given: the block is kept then."""
        changed = None if given is None else given.changed()
        if changed is None:
            return False
        frame.keep()
        self._distrust(f"it changes what it is given ({changed})")
        return True

    def _begins_to_change(self, begun: NewChanges, frame: Frame, out: Any) -> None:
        """The recompute of this forward finds the old values, those of later ones find theirs."""
        buffers, attributes = begun.slots
        old = BufferSnapshot.of(begun.buffers), AttributeSnapshot(begun.attributes)
        frame.found = _Found((frame.found, *old))
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
            self._distrust(_CHANGED_LATER)
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
        frame.found = _Found((exchanged, buffers, attributes_before, given))
        kind = None if side_effects or changed is not None else self._kind(frame)
        if kind is not None and kind in self.tried.kinds:
            frame.evict()
            _move_arguments(directive, frame)
            self._trust(buffers, side_effects)
        elif changed is not None:  # a second run would change it again
            frame.keep()
            self._distrust(f"it changes {changed}")
        else:
            dry_run = self._dry_run(frame, out)
            if dry_run is None:
                self._could_not_try(buffers, side_effects)
            elif dry_run.problem is not None:
                frame.keep()
                self._distrust(dry_run.problem)
            else:
                self._remember_trial(dry_run, kind)
                self._trust(buffers, side_effects)
                if self.comes_last:  # what follows may be large
                    frame.evict()
                else:
                    self.tried.waiting = Waiting(self, frame, given)
        return out

    def _could_not_try(self, buffers: BufferSnapshot, side_effects: SideEffects) -> None:
        """Without memory to try it again and again, what a recompute checks anyway must do."""
        self.attempts += 1
        if self.attempts == _MOST_ATTEMPTS:
            self._trust(buffers, side_effects)
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

    def _distrust(self, problem: str) -> None:
        self.trusted = False
        what = f"cannot be recomputed: {problem}. It is kept from now on"
        self.tried.tell(self, what, f"; exclude={self.name!r} avoids this warning")

    def _trust(self, buffers: BufferSnapshot, side_effects: SideEffects) -> None:
        self._settle(list({*buffers.changed(), *norm_buffers(self.module)}), side_effects)
        self.trusted = True
        self.early_stop = self.compiled is not None or self.tried.stops.get(type(self.module), True)

    def _kind(self, frame: Frame) -> Hashable | None:
        """What tells whether another block's verdict holds for this one; None if none can."""
        # Where several ranks train, each block finds out for itself which collectives it issues.
        if self.compiled is not None or is_distributed():
            return None
        kind = kind_of(self.module)
        return None if kind is None else (kind, tuple(frame.shapes), tuple(frame.dtypes))

    def _frame(
        self,
        directive: Directive,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        **options: Any,
    ) -> Frame:
        evictor = directive.evictor
        return Frame(
            function,
            args,
            kwargs,
            name=f"block {self.name!r}",
            run=directive.run,
            listener=directive.listener,
            make_room=None if evictor is None else evictor.make_room,
            # A listener wants to see the peak of the whole forward.
            early_stop=self.early_stop and directive.listener is None,
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


def _as_one(
    exchanged: SwappedParameters | None,
    changing: list[BufferSlot],
    attributes_before: AttributeSnapshot | None,
    given: ArgumentCopies | None,
) -> Found | None:
    """What a forward that begins now finds, if a recompute may find something else."""
    buffers = BufferSnapshot(changing) if changing else None
    things = [
        thing for thing in (exchanged, buffers, attributes_before, given) if thing is not None
    ]
    if len(things) > 1:
        return _Found(things)
    return things[0] if things else None


class _Found:
    """Several things that a forward found, as one."""

    __slots__ = ("_things",)

    def __init__(self, things: Sequence[Found | None]) -> None:
        self._things = [thing for thing in things if thing is not None]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        for thing in self._things:
            function = functools.partial(thing.run, function)
        return function(*args)
