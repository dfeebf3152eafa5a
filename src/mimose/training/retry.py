"""After an out-of-memory: free the step, restore its start, and try a stricter plan."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mimose.errors import OutOfMemory
from mimose.execution import CollectivesIssued
from mimose.tensors import is_out_of_memory, release_traceback
from mimose.training.decision import AS_PLANNED, EVERYTHING, STRICTER
from mimose.training.ranks import why_not_alone
from mimose.training.rewind import Rewind

if TYPE_CHECKING:
    from mimose.training.engine import Engine

T = TypeVar("T")

_NO_RETRY = "the step is not run again"


def retry_step(engine: Engine, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    """The result of `function`, from the first, second or third attempt."""
    start, collectives = engine.rewind_point(), CollectivesIssued()
    handled = sys.exc_info()[1]  # set if called from an exception handler
    strictness = AS_PLANNED
    while True:
        try:
            engine.be_as_strict_as(strictness)
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
            engine.be_as_strict_as(AS_PLANNED)
        gc.collect()
        refusal = _why_not_retry(start, collectives, engine)
        start.rewind()
        kept_something = engine.give_up_step()
        if refusal is not None:
            engine.report_failure(why, _NO_RETRY, again=False)
            raise OutOfMemory(f"{why}. {refusal}{_settle(start)}")
        if strictness == EVERYTHING:
            engine.report_failure(why, _NO_RETRY, again=False)
            explanation = f"{engine.does_not_fit()}{_settle(start)}"
            raise OutOfMemory(f"{explanation}. The last attempt failed with: {why}")
        strictness = STRICTER if kept_something and strictness == AS_PLANNED else EVERYTHING
        blocks = "more blocks" if strictness == STRICTER else "every block"
        what_now = f"the step is run again with {blocks} recomputed"
        engine.report_failure(why, what_now, again=True)


def _why_not_retry(start: Rewind, collectives: CollectivesIssued, engine: Engine) -> str | None:
    """Why the step must not be retried, in words; None if it may."""
    alone = why_not_alone(collectives, in_forward=engine.failed_in_forward())
    if alone is not None:
        return f"A rank cannot retry a step on its own: {alone}"
    obstacle = start.obstacle
    return None if obstacle is None else f"The step cannot be retried because {obstacle}"


def _settle(start: Rewind) -> str:
    """End the attempts; a warning, if they have changed gradients from before the step."""
    spoiled = start.settle()
    if not spoiled:
        return ""
    return (
        f". {spoiled} gradients from before this step now contain a part of this batch's: clear "
        "them before you train on"
    )
