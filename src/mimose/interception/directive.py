"""How one call of a block runs, as a value, and the interfaces that decide and carry it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mimose.costs import Option
from mimose.execution import Frame, Listener


class Evictor(Protocol):
    """Manages kept activations, which it may evict when memory runs out."""

    def hold(self, run: int, frame: Frame) -> None:
        """Call number `run` of the step keeps its activations in `frame`; they may be evicted."""

    def make_room(self) -> bool:
        """Memory ran out: evict activations. Returns whether any memory was freed."""


class Mover(Protocol):
    """Moves what the backward of one call needs to the host, and fetches it in time."""

    def run_saving_on_host(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function, and move the tensors that it saves for its backward."""

    def move_arguments(self, frame: Frame) -> None:
        """Move the arguments that only this call uses. The call is over and will be recomputed."""


@dataclass(frozen=True, slots=True)
class Directive:
    """How one call of a block runs."""

    option: Option
    run: int = -1
    """The number of this call in its step, for listener and evictor."""
    listener: Listener | None = None
    """Observes the call; None if it is not observed."""
    evictor: Evictor | None = None
    """May evict the activations of a kept call; None if they must stay."""
    guarded: bool = False
    """Whether the call, kept near the limit, is recomputed if memory runs out in its forward."""
    plainly: bool = False
    """Whether a kept call needs no frame that could be evicted: it gets one only if it could not
    run again without."""
    after: Callable[[Any, Any], None] | None = None
    """Called once, with the inputs and the output of the call."""
    mover: Mover | None = None
    """Moves the tensors if the option uses the host."""


KEEP, RECOMPUTE = Directive(Option.KEEP), Directive(Option.RECOMPUTE)


class Director(Protocol):
    """Decides how blocks run. Called at each training call of a block."""

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        """How to run a call of the block at index `block` with these arguments."""

    def ran_out(self, block: int) -> None:
        """Memory ran out in a forward of this block; the call is run again, recomputed."""
