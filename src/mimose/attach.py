"""Sit on a model's blocks, so that each runs kept or recomputed, as a director says.

The first time that a block is to be recomputed it is tried: run, recomputed at once and compared.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from mimose.blocks import Block
from mimose.buffers import Place, Snapshot, norm_places, places_in
from mimose.bypass import refuse_in_compiled_code
from mimose.caches import brings_a_past, cache_positions, without_cache
from mimose.control import Listener, watch_backward
from mimose.errors import ConflictError, warn
from mimose.failure import is_out_of_memory
from mimose.likeness import make_of
from mimose.ranks import Spoken, several
from mimose.recompute import Found, Frame, foreign_hooks
from mimose.rehearsal import Rehearsal
from mimose.rescue import Guard
from mimose.seat import Seat, under_transform
from mimose.takeover import Takeover
from mimose.traces import Exchanged, FirstLook, Imprint, Traces, parameter_places

_MOST_ATTEMPTS = 3
"""How often a block is tried for which there is no memory."""


class Director(Protocol):
    """Whoever decides: asked at each training call of a block."""

    def recompute(self, seat: BlockSeat, args: Any, kwargs: Any) -> bool:
        """Whether this run of the block keeps nothing and recomputes."""

    def ran_out(self, seat: BlockSeat) -> None:
        """Memory ran out while the block, guarded, was to be kept: it is recomputed instead."""


class Tried:
    """What the first runs of a model's blocks have shown that holds for others of their kind."""

    def __init__(self) -> None:
        self.stops: dict[type[nn.Module], bool] = {}
        """Whether an early stop spares anything, by kind of block: counting is slow."""
        self.makes: set[Hashable] = set()
        """What was recomputed and compared: how a block is made, and what its forward saved."""


class BlockSeat(Seat):
    """Sits on one block and runs it as the director says."""

    __slots__ = (
        "after",
        "attempts",
        "cache_positions",
        "changing",
        "director",
        "early_stop",
        "guarded",
        "index",
        "listener",
        "name",
        "parameters",
        "quiet",
        "run",
        "speaks_to",
        "traces",
        "tried",
        "trusted",
    )

    def __init__(
        self,
        block: Block,
        index: int,
        director: Director,
        tried: Tried | None = None,
    ) -> None:
        super().__init__(block.module)
        self.tried = Tried() if tried is None else tried
        self.name = block.name
        self.index = index
        self.director = director
        self.run = index
        """What the listener is told of the coming run; the director may set it."""
        self.listener: Listener | None = None
        self.after: Callable[[Any, Any], None] | None = None
        """Called once, with the inputs and the output of the coming run."""
        self.cache_positions = cache_positions(block.module)
        """Where a cache may stand among the arguments; None if no cache is expected."""
        self.trusted: bool | None = None
        """Whether it can be recomputed; not known before its first run."""
        self.attempts = 0
        """How often there was no memory to try it."""
        self.guarded = False
        """Whether the coming run, if it is kept, is near the limit; the director sets it."""
        self.early_stop = True
        self.changing: list[Place] = []
        """The buffers that its forward changes."""
        self.quiet: list[Place] = []
        """Those that it has left alone so far."""
        self.traces = Traces()
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.speaks_to: frozenset[int] = frozenset()
        """The ranks that take part in collectives of its forward, found out on its first run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training or not torch.is_grad_enabled():
            return self.plain(args, kwargs)
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return self.plain(args, kwargs)
            refuse_in_compiled_code()
        if under_transform():
            return self.plain(args, kwargs)
        bound = False
        if self.cache_positions is not None:
            bound = brings_a_past(self.cache_positions, args, kwargs)
            if not bound:
                args, kwargs = without_cache(self.module, self.cache_positions, args, kwargs)
        again = self.director.recompute(self, args, kwargs)
        if again and self.trusted is not False and not bound:
            out = self._recomputed(args, kwargs)
        elif self.guarded and self.trusted and self._may_run_twice and not bound:
            out = self._kept_if_it_fits(args, kwargs)
        else:
            out = self.plain(args, kwargs)
        if self.listener is not None:
            watch_backward(self.listener, self.run, (args, kwargs), out)
        if self.after is not None:
            after, self.after = self.after, None
            after((args, kwargs), out)
        return out

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What its first run has shown, in plain values; None if it has not run."""
        if self.trusted is None:
            return None
        names = {id(m): name for name, m in self.module.named_modules()}

        def named(places: Iterable[Place]) -> list[list[str]]:
            return [[names[id(m)], name] for m, name in places if id(m) in names]

        return {
            "trusted": self.trusted,
            "early_stop": self.early_stop,
            "changing": named(self.changing),
            "traces": named(self.traces.attributes),
            "draws": self.traces.draws,
        }

    def believe(self, verdict: Mapping[str, Any]) -> None:
        """Take over the verdict of an earlier run of the same model: no need to try again.

        Unless it throws dice, or hooks inside it want to be heard first.
        """
        parts = dict(self.module.named_modules())
        hooked = any(part._forward_hooks for name, part in parts.items() if name)
        if hooked or verdict.get("draws", False):
            return
        changing = [(parts[str(at)], str(name)) for at, name in verdict["changing"]]
        left = [(parts[str(at)], str(name)) for at, name in verdict.get("traces", ())]
        self._settle(changing, Traces(tuple(left)))
        self.early_stop = bool(verdict["early_stop"])
        self.trusted = bool(verdict["trusted"])

    def _settle(self, changing: list[Place], traces: Traces) -> None:
        self.changing, self.traces = changing, traces
        self.quiet = [place for place in places_in(self.module) if place not in changing]
        self.parameters = parameter_places(self.module)

    def let_go(self) -> None:
        """Hold on to no module and no parameter any more."""
        self.changing, self.quiet, self.parameters, self.traces = [], [], [], Traces()
        self.tried = Tried()

    @property
    def _may_run_twice(self) -> bool:
        """Whether nobody else takes part in its forward: other ranks, or hooks such as FSDP2's."""
        return not self.speaks_to and not self.module._forward_pre_hooks

    def _kept_if_it_fits(self, args: Any, kwargs: Any) -> Any:
        guard = Guard(self.changing, args, kwargs)
        try:
            return self.plain(args, kwargs)
        except Exception as error:
            if not guard.can_help(error):
                raise
            guard.rewind(error)
        self.director.ran_out(self)
        return self._recomputed(args, kwargs)

    def _recomputed(self, args: Any, kwargs: Any) -> Any:
        if self.compiled is not None:
            return self._checkpointed(self.compiled, args, kwargs)
        # The block's own forward hooks run once, outside of what is recomputed: only `forward`
        # is, and it is exchanged for the length of this call.
        module = self.module
        place, forward = module.__dict__, module.forward
        former = place.get("forward")

        def restore() -> None:
            if former is None:
                place.pop("forward", None)
            else:
                place["forward"] = former

        def once(*args: Any, **kwargs: Any) -> Any:
            restore()
            return self._checkpointed(forward, args, kwargs)

        place["forward"] = once
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            restore()

    def _checkpointed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.trusted is None:
            return self._first_time(function, args, kwargs)
        frame = self._frame(function, args, kwargs, found=self._found())
        if not self.quiet:
            return frame.forward(args, kwargs)
        before = [(module._buffers[name], _version(module, name)) for module, name in self.quiet]
        out = frame.forward(args, kwargs)
        moved = [
            place
            for place, (buffer, version) in zip(self.quiet, before, strict=True)
            if place[0]._buffers[place[1]] is not buffer or _version(*place) != version
        ]
        if moved:
            frame.found = _Found((frame.found, Snapshot(moved)))
            self._settle(self.changing + moved, self.traces)
            warn(
                f"block {self.name!r} changes its buffer {moved[0][1]!r} from now on, which it had "
                "left alone: the recompute of this one step starts from the changed value"
            )
        return out

    def _found(self) -> Found | None:
        """What a forward that begins now finds, if a recompute may find something else."""
        exchanged = Exchanged.among(self.parameters)
        if not self.traces and exchanged is None:
            return Snapshot(self.changing) if self.changing else None
        return _Found((exchanged, Snapshot(self.changing), Imprint(self.traces)))

    def _first_time(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run, recompute at once and compare: what cannot be recomputed is found out here."""
        self._refuse_foreign_hooks()
        buffers, look = Snapshot(places_in(self.module)), FirstLook(self.module)
        exchanged = Exchanged.among(parameter_places(self.module))
        frame = self._frame(function, args, kwargs, keeping=True)
        with look.listening():
            out = frame.forward(args, kwargs)
        traces, changed_a_parameter = look.traces(), look.changed_a_parameter
        frame.found = _Found((exchanged, buffers, look.imprint(traces)))
        make = None if traces or changed_a_parameter else self._make(frame)
        if make is not None and make in self.tried.makes:
            frame.let_go()
            self._trust(buffers, traces)
        elif changed_a_parameter:  # a second run would change it again
            self._distrust("it changes a frozen parameter")
        else:
            rehearsal = self._rehearsed(frame, out)
            if rehearsal is None:
                self._could_not_try(buffers, traces)
            elif rehearsal.problem is not None:
                self._distrust(rehearsal.problem)
            else:
                self._believe_trial(rehearsal, make)
                self._trust(buffers, traces)
        return out

    def _could_not_try(self, buffers: Snapshot, traces: Traces) -> None:
        """Without memory to try it again and again, what a recompute checks anyway must do."""
        self.attempts += 1
        if self.attempts == _MOST_ATTEMPTS:
            self._trust(buffers, traces)
            warn(
                f"block {self.name!r} is too large to be tried: with its activations there twice, "
                "memory ran out. It is recomputed all the same; that its recompute gives what its "
                "forward gave is not compared"
            )

    def _rehearsed(self, frame: Frame, out: Any) -> Rehearsal | None:
        """How a recompute goes; None without memory to try: the next run is tried again then."""
        spoken = Spoken()
        count = self.compiled is None and type(self.module) not in self.tried.stops
        try:
            rehearsal = frame.rehearse(out, count_operators=count)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        self.speaks_to = spoken.to()
        return rehearsal

    def _believe_trial(self, rehearsal: Rehearsal, make: Hashable | None) -> None:
        """What went well holds for others of the kind."""
        # Stopping takes an exception, tens of microseconds: only where it spares something.
        if rehearsal.operators_after_last is not None:
            self.tried.stops[type(self.module)] = rehearsal.operators_after_last != 0
        if make is not None:
            self.tried.makes.add(make)

    def _distrust(self, problem: str) -> None:
        self.trusted = False
        warn(
            f"block {self.name!r} cannot be recomputed: {problem}. It is kept from now on; "
            f"exclude={self.name!r} says so in advance"
        )

    def _trust(self, buffers: Snapshot, traces: Traces) -> None:
        self._settle(list({*buffers.changed(), *norm_places(self.module)}), traces)
        self.trusted = True
        self.early_stop = self.compiled is not None or self.tried.stops.get(type(self.module), True)

    def _make(self, frame: Frame) -> Hashable | None:
        """What tells whether another block's verdict holds for this one; None if none can."""
        if self.compiled is not None or several():  # each finds out for itself who speaks to whom
            return None
        make = make_of(self.module)
        return None if make is None else (make, tuple(frame.shapes), tuple(frame.dtypes))

    def _frame(self, function: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Frame:
        return Frame(
            function,
            args,
            kwargs,
            name=f"block {self.name!r}",
            block=self.run,
            listener=self.listener,
            # Whoever listens wants to see the peak of the whole forward.
            early_stop=self.early_stop and self.listener is None,
            **options,
        )

    def _refuse_foreign_hooks(self) -> None:
        hooks = foreign_hooks()
        if hooks:
            raise ConflictError(
                f"block {self.name!r} runs under saved-tensor hooks of {hooks}: activations are "
                "already offloaded or checkpointed there, so what a kept block costs cannot be "
                "told. Switch that off, or leave this model to it and do not attach mimose"
            )


class _Found:
    """Several things that a forward found, as one."""

    __slots__ = ("_things",)

    def __init__(self, things: Sequence[Found | None]) -> None:
        self._things = [thing for thing in things if thing is not None]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        for thing in self._things:
            function = functools.partial(thing.run, function)
        return function(*args)


def _version(module: nn.Module, name: str) -> int:
    buffer = module._buffers[name]
    return -1 if buffer is None or buffer.is_inference() else buffer._version


class Attachment:
    """A model's blocks with a seat on each, until `detach`."""

    def __init__(self, model: nn.Module, blocks: list[Block], director: Director) -> None:
        self.takeover = Takeover(model, blocks)
        tried = Tried()
        self.seats = [BlockSeat(block, i, director, tried) for i, block in enumerate(blocks)]
        self._looks = 0
        # Whoever still holds a handle of a model that is gone holds none of its tensors.
        self._at_the_end = weakref.finalize(model, _let_go, list(map(weakref.ref, self.seats)))
        self._at_the_end.atexit = False
        self.take_seats()

    def take_seats(self) -> None:
        """Sit down again where a block was compiled, or otherwise replaced its call, since.

        One tells of all, as a rule; all are looked at now and then.
        """
        self._looks += 1
        if self._looks % 16 < 2 or not self.seats[0].taken:
            for seat in self.seats:
                seat.take()

    def detach(self) -> None:
        """The blocks are as before."""
        for seat in self.seats:
            seat.leave()
        self._at_the_end()
        self.takeover.undo()


def _let_go(seats: list[weakref.ref[BlockSeat]]) -> None:
    for ref in seats:
        seat = ref()
        if seat is not None:
            seat.let_go()


class _Everything:
    """The director that recomputes every block."""

    def recompute(self, seat: BlockSeat, args: Any, kwargs: Any) -> bool:
        return True

    def ran_out(self, seat: BlockSeat) -> None:
        raise AssertionError("nothing is kept")


RECOMPUTE_EVERYTHING: Director = _Everything()
