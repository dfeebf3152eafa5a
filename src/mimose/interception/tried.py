"""What the first runs of blocks have shown that other blocks of the model can use."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import nn

from mimose.errors import warn
from mimose.execution import ArgumentCopies, Frame

if TYPE_CHECKING:
    from mimose.interception.verdict import JudgedInterceptor

log = logging.getLogger("mimose")

CHANGED_LATER = "the model changes one of its arguments in place after its run"


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

    def tell(self, block: JudgedInterceptor, what: str, remedy: str = "") -> None:
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
        self, interceptor: JudgedInterceptor, frame: Frame, given: ArgumentCopies | None
    ) -> None:
        self._interceptor, self._frame = weakref.ref(interceptor), weakref.ref(frame)
        self._given = None if given is None else weakref.ref(given)

    def settle(self) -> None:
        """The next block begins to run."""
        interceptor, frame = self._interceptor(), self._frame()
        if interceptor is None:
            return
        interceptor.tried.waiting = None
        if frame is None:  # the step is over, or was given up
            return
        given = None if self._given is None else self._given()
        if frame.saved_arguments.changed or (given is not None and given.tensors_changed):
            frame.keep()
            interceptor.tried.changed_later.add(type(interceptor.module))
            interceptor.distrust(CHANGED_LATER)
        else:
            frame.evict()
