"""mimose at a trainer's side: attached while it trains, and what was learned kept in between."""

from __future__ import annotations

import inspect
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from torch import nn

from mimose.api import Mimose, auto_checkpoint, refuse_options
from mimose.errors import warn
from mimose.integrations.metrics import Interval

log = logging.getLogger("mimose")

FILE_NAME = "mimose.json"
"""Where a checkpoint folder keeps what was learned."""


@final
class Companion:
    """Attaches when a run begins, detaches when it ends, carries what was learned from run to run.

    Trainers wrap, move and rebuild models up to the last moment, so nothing is attached before
    training begins; and nothing is left on the model when it ends.
    """

    def __init__(self, memory_budget: int | str, **options: Any) -> None:
        refuse_options(memory_budget, options)
        self._memory_budget = memory_budget
        self._options = options
        self._interval = Interval()
        self._learned: dict[str, Any] | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self.handle: Mimose | None = None
        """Of the present run, or of the last one."""

    def __str__(self) -> str:
        """What was asked for beyond the defaults, and where it stands."""
        usual = inspect.signature(auto_checkpoint).parameters
        said = {n: value for n, value in self._options.items() if value != usual[n].default}
        given = {"memory_budget": self._memory_budget, **said}
        asked = ", ".join(f"{name}={value!r}" for name, value in given.items())
        state = "not attached yet" if self.handle is None else repr(self.handle)
        return f"{asked}; {state}"

    @property
    def attached(self) -> bool:
        return self.handle is not None and self.handle.attached

    def begin(self, model: nn.Module) -> Mimose:
        """A run begins. If it begins once more (after a smaller batch was chosen), go on."""
        if self.handle is not None and self.attached and self._model() is model:
            return self.handle
        self.end()
        self.handle = auto_checkpoint(model, self._memory_budget, **self._options)
        self._model = weakref.ref(model)
        self._interval = Interval()
        if self._learned:
            self.handle.load_state_dict(self._learned)
        return self.handle

    def end(self) -> None:
        """The run is over, in whatever way: the model is as before."""
        if self.handle is not None and self.handle.attached:
            self._learned = self.handle.state_dict()
            self.handle.detach()

    def row(self) -> dict[str, float]:
        """What to log now."""
        return self._interval.row(self.handle) if self.handle and self.attached else {}

    # What was learned

    def state_dict(self) -> dict[str, Any]:
        """What was learned so far, as plain numbers and strings."""
        if self.handle is not None and self.attached:
            return self.handle.state_dict()
        return self._learned or {}

    def load_state_dict(self, learned: dict[str, Any]) -> None:
        """Start from this: now if attached, else with the next run."""
        self._learned = learned
        if self.handle is not None and self.attached:
            self.handle.load_state_dict(learned)

    def save(self, folder: Path) -> None:
        """Beside a trainer's checkpoint."""
        if self.attached and folder.is_dir():
            (folder / FILE_NAME).write_text(json.dumps(self.state_dict()))

    def load(self, folder: Path) -> None:
        """From beside a trainer's checkpoint. One that was made without mimose has nothing."""
        file = folder / FILE_NAME
        if not file.is_file():
            log.info("%s has no %s: mimose observes anew", folder, FILE_NAME)
            return
        try:
            learned = json.loads(file.read_text())
        except ValueError as error:
            learned = error
        if isinstance(learned, dict):
            self.load_state_dict(learned)
        else:
            warn(f"{file} is damaged ({learned!r:.80}): mimose observes anew. Training goes on")
