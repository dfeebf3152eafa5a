"""Out of memory: let go of everything, go back to the start, and try a stricter plan."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from mimose.errors import OutOfMemory
from mimose.failure import forget, is_out_of_memory
from mimose.ranks import Spoken, why_not_alone
from mimose.restart import Restart
from mimose.scheduler import AS_PLANNED, EVERYTHING, STRICTER

T = TypeVar("T")


class Patient(Protocol):
    """Whose steps are to be run again."""

    @property
    def in_forward(self) -> bool:
        """Whether the model's forward was left by the failure, before any backward."""

    def restart(self) -> Restart: ...
    def be_as_strict_as(self, strictness: int) -> None: ...
    def give_up_step(self, why: str) -> bool:
        """Forget the step that failed; whether it kept anything."""

    def failed_in_forward(self) -> bool:
        """Whether the model's forward was still running when memory ran out."""

    def does_not_fit(self) -> str:
        """What cannot be helped, in words and numbers."""


def recover(patient: Patient, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    """The value of `function`, if need be of a second or third attempt."""
    start, spoken = patient.restart(), Spoken()
    strictness = AS_PLANNED
    while True:
        why, spoken = "", Spoken()
        try:
            patient.be_as_strict_as(strictness)
            value = function(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                start.settle()
                raise
            why = str(error)
            forget(error)
        finally:
            patient.be_as_strict_as(AS_PLANNED)
        if not why:
            start.settle()
            return value
        bound = why_not_alone(spoken, in_forward=patient.in_forward)
        if bound is not None:
            start.settle()
            raise OutOfMemory(f"{why}. One of several ranks must not try again alone: {bound}")
        alone = why_not_alone(spoken, in_forward=patient.failed_in_forward())
        kept_something = patient.give_up_step(why)
        start.rewind()
        gc.collect()
        if alone is not None:
            start.settle()
            raise OutOfMemory(
                f"memory ran out on this rank, and it cannot try again: {alone} ({why})"
            )
        if strictness == EVERYTHING:
            start.settle()
            raise OutOfMemory(f"{patient.does_not_fit()} ({why})")
        strictness = STRICTER if kept_something and strictness == AS_PLANNED else EVERYTHING
