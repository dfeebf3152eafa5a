"""How one call of a block runs: the whole answer, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mimose.costs import Option
from mimose.execution import Frame, Listener


class Evictor(Protocol):
    """Takes charge of activations that are kept for now."""

    def hold(self, run: int, frame: Frame) -> None:
        """The call of this number keeps its activations in `frame`, which may be evicted."""

    def make_room(self) -> bool:
        """Memory ran out: evict what can be; whether anything came free."""


class Mover(Protocol):
    """Moves what one call needs in its backward to the host, and sees to it that it comes back."""

    def run_saving_on_host(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function; what it saves for its backward moves."""

    def move_arguments(self, frame: Frame) -> None:
        """The call is over, and will be recomputed: arguments that only it holds move."""


@dataclass(frozen=True, slots=True)
class Directive:
    """How one call of a block runs."""

    option: Option
    run: int = -1
    """The number of this call in its step, for listener and evictor."""
    listener: Listener | None = None
    """Observes the call; None if it is not observed."""
    evictor: Evictor | None = None
    """Where it is kept, its activations may be evicted by this; None if they stay."""
    guarded: bool = False
    """Whether it is kept near the limit, and recomputed if memory runs out in its forward."""
    after: Callable[[Any, Any], None] | None = None
    """Called once, with the inputs and the output of the call."""
    mover: Mover | None = None
    """Where the option uses the host: what does the moving."""


KEEP, RECOMPUTE = Directive(Option.KEEP), Directive(Option.RECOMPUTE)


class Director(Protocol):
    """Decides how blocks run: asked at each training call of a block."""

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        """How the block of this index runs, called with these arguments."""

    def ran_out(self, block: int) -> None:
        """Memory ran out while the block was to be kept: it is recomputed instead."""
