"""Out of memory: let go of everything, go back to the start, and try a stricter plan."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from mimose.errors import OutOfMemory
from mimose.execution import CollectivesIssued
from mimose.tensors import is_out_of_memory, release_traceback
from mimose.training.decision import AS_PLANNED, EVERYTHING, STRICTER
from mimose.training.ranks import why_not_alone
from mimose.training.rewind import Rewind

T = TypeVar("T")

_NOT_AGAIN = "the step is not run again"


class Retried(Protocol):
    """Whose steps are to be run again."""

    def rewind_point(self) -> Rewind: ...
    def be_as_strict_as(self, strictness: int) -> None: ...
    def failed_in_forward(self) -> bool:
        """Whether the model's forward was still running when memory ran out."""

    def give_up_step(self) -> bool:
        """Forget the step that failed; whether it kept anything."""

    def tell_of_failure(self, why: str, what_now: str) -> None:
        """Say that memory ran out, and what is done about it."""

    def does_not_fit(self) -> str:
        """What cannot be helped, in words and numbers."""


def retry_step(retried: Retried, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    """The value of `function`, if need be of a second or third attempt."""
    start, collectives = retried.rewind_point(), CollectivesIssued()
    handled = sys.exc_info()[1]  # if this is called where an exception is dealt with
    strictness = AS_PLANNED
    while True:
        try:
            retried.be_as_strict_as(strictness)
            value = function(*args, **kwargs)
        except BaseException as error:
            if not is_out_of_memory(error):
                start.settle()
                raise
            why = str(error)
            release_traceback(error, keep=handled)
        else:
            start.settle()
            return value
        finally:
            retried.be_as_strict_as(AS_PLANNED)
        bound = _why_bound(start, collectives, retried)
        gc.collect()
        start.rewind()
        kept_something = retried.give_up_step()
        if bound is not None:
            retried.tell_of_failure(why, _NOT_AGAIN)
            raise OutOfMemory(f"{why}. {bound}{_left_behind(start)}")
        if strictness == EVERYTHING:
            retried.tell_of_failure(why, _NOT_AGAIN)
            said = f"{retried.does_not_fit()}{_left_behind(start)}"
            raise OutOfMemory(f"{said}. The last attempt failed with: {why}")
        strictness = STRICTER if kept_something and strictness == AS_PLANNED else EVERYTHING
        blocks = "more blocks" if strictness == STRICTER else "every block"
        retried.tell_of_failure(why, f"the step is run again with {blocks} recomputed")


def _why_bound(start: Rewind, collectives: CollectivesIssued, retried: Retried) -> str | None:
    """Why there must be no other attempt, in words; None if there may."""
    alone = why_not_alone(collectives, in_forward=retried.failed_in_forward())
    if alone is not None:
        return f"A rank cannot retry a step on its own: {alone}"
    if not start.possible:
        return (
            "The step cannot be retried because it has changed parameters: call optimizer.step() "
            "outside of the function that retry() calls"
        )
    return None


def _left_behind(start: Rewind) -> str:
    """No attempt will follow: what failed ones have left in gradients, in words."""
    spoiled = start.settle()
    if not spoiled:
        return ""
    return (
        f". {spoiled} gradients from before this step now contain a part of this batch's: clear "
        "them before you train on"
    )
