"""Results of trials that the blocks of a model share."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import nn

from mimose.errors import warn
from mimose.execution import ArgumentCopies, ChangeDetector, Frame

if TYPE_CHECKING:
    from mimose.interception.verdict import JudgedInterceptor

log = logging.getLogger("mimose")

CHANGED_LATER = "the model changes one of its arguments in place after its run"


class Tried:
    """Results of trials that also hold for other blocks of the same class or kind."""

    def __init__(self) -> None:
        self.stops: dict[type[nn.Module], bool] = {}
        """Whether an early stop skips any operators, by class of block. Counting them is slow."""
        self.trials = 0
        """The number of trials so far. Memory measured during a trial is not representative."""
        self.kinds: set[Hashable] = set()
        """Keys of blocks that passed a trial: their structure, and what their forward saved."""
        self.changed_later: set[type[nn.Module]] = set()
        """The classes of blocks whose arguments are changed in place after their run."""
        self.waiting: Waiting | None = None
        """The tried block whose verdict waits for the next block to run."""
        self.running: JudgedInterceptor | None = None
        """The block that runs now, or is recomputed now, in a way that mimose has chosen."""
        self.classes: Counter[type[nn.Module]] = Counter()
        """The number of blocks of each class."""
        self.with_large: weakref.WeakSet[ChangeDetector] = weakref.WeakSet()
        """The detectors of blocks among whose attributes are large tensors."""
        self.first_node = 0
        """The number of the first autograd node of the model's present forward."""
        self._reported: set[tuple[type[nn.Module], str]] = set()

    def running_in(
        self, block: JudgedInterceptor, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function that runs a block, with blocks that it calls as a part of it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self.running = self.running, block
            try:
                return function(*args, **kwargs)
            finally:
                self.running = outer

        return run

    def tell(self, block: JudgedInterceptor, what: str, remedy: str = "") -> None:
        """Warn about a block. For further blocks of its class with the same problem, only log."""
        kind = type(block.module)
        if (kind, what) in self._reported:
            log.info("mimose: block %r %s", block.name, what)
            return
        self._reported.add((kind, what))
        others = self.classes[kind] - 1
        hint = f". The log (INFO) names which of the {others} other {kind.__name__} are the same"
        warn(f"block {block.name!r} {what}{remedy}{hint if others else ''}")

    def tell_once(self, block: JudgedInterceptor, what: str) -> None:
        """Warn about the first block of a class to which this applies, for all of them."""
        key = type(block.module), what
        if key not in self._reported:
            self._reported.add(key)
            warn(f"block {block.name!r} {what}")


class Waiting:
    """A tried block whose activations stay until the next block runs.

    Only then is it known whether the model changes the block's arguments in place after its run,
    e.g. a state that is carried from block to block. The block could not be recomputed from them.
    """

    def __init__(
        self, interceptor: JudgedInterceptor, frame: Frame, given: ArgumentCopies | None
    ) -> None:
        self._interceptor, self._frame = weakref.ref(interceptor), weakref.ref(frame)
        self._given = None if given is None else weakref.ref(given)

    def settle(self) -> None:
        """Evict or keep the activations. Called when the next block starts."""
        interceptor, frame = self._interceptor(), self._frame()
        if interceptor is None:
            return
        interceptor.tried.waiting = None
        if frame is None:  # the step is over or was abandoned
            return
        given = None if self._given is None else self._given()
        if frame.saved_arguments.changed or (given is not None and given.tensors_changed):
            frame.keep()
            interceptor.tried.changed_later.add(type(interceptor.module))
            interceptor.distrust(CHANGED_LATER)
        else:
            frame.evict()
