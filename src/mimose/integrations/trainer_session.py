"""mimose in one trainer: attached during each run, with a state that lasts over several runs."""

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
from mimose.integrations.metrics import IntervalMetrics

log = logging.getLogger("mimose")

FILE_NAME = "mimose.json"
"""The file in a checkpoint folder that contains the state of mimose."""


@final
class TrainerSession:
    """Attaches when a run begins, detaches when it ends, and passes the state on to the next run.

    It attaches as late as possible, because trainers wrap, move and rebuild models before that.
    """

    def __init__(self, memory_budget: int | str, **options: Any) -> None:
        refuse_options(memory_budget, **options)
        self._memory_budget = memory_budget
        self._options = options
        self._metrics = IntervalMetrics()
        self._state: dict[str, Any] | None = None
        self._model_if_alive: Callable[[], nn.Module | None] = lambda: None
        self.handle: Mimose | None = None
        """The handle of the current or last run."""

    def __str__(self) -> str:
        """The options that differ from their defaults, and the handle."""
        defaults = inspect.signature(auto_checkpoint).parameters
        changed = {n: value for n, value in self._options.items() if value != defaults[n].default}
        options = {"memory_budget": self._memory_budget, **changed}
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{shown}; {'not attached yet' if self.handle is None else repr(self.handle)}"

    @property
    def attached(self) -> bool:
        return self.handle is not None and self.handle.attached

    def begin(self, model: nn.Module) -> Mimose:
        """Attach to the model, unless already attached (a restart with a smaller batch size)."""
        if self.handle is not None and self.attached and self._model_if_alive() is model:
            return self.handle
        self.end()
        self.handle = auto_checkpoint(model, self._memory_budget, **self._options)
        self._model_if_alive = weakref.ref(model)
        self._metrics = IntervalMetrics()
        if self._state:
            self.handle.load_state_dict(self._state)
        return self.handle

    def end(self) -> None:
        """Keep the state and restore the model."""
        if self.handle is not None and self.handle.attached:
            self._state = self.handle.state_dict()
            self.handle.detach()

    def metrics(self) -> dict[str, float]:
        """The metrics to log; empty if not attached."""
        return self._metrics.since_last(self.handle) if self.handle and self.attached else {}

    def state_dict(self) -> dict[str, Any]:
        """The state of the current or last run."""
        if self.handle is not None and self.attached:
            return self.handle.state_dict()
        return self._state or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state now if attached, else when the next run begins."""
        self._state = state
        if self.handle is not None and self.attached:
            self.handle.load_state_dict(state)

    def save(self, folder: Path) -> None:
        """Save the state to a trainer's checkpoint folder."""
        if self.attached and folder.is_dir():
            (folder / FILE_NAME).write_text(json.dumps(self.state_dict()))

    def load(self, folder: Path) -> None:
        """Load the state from a trainer's checkpoint folder, if it contains one."""
        file = folder / FILE_NAME
        if not file.is_file():
            log.info("there is no %s: mimose starts this run without learned costs", file)
            return
        try:
            state = json.loads(file.read_text())
            problem = f"it holds a {type(state).__name__} instead of an object"
        except ValueError as error:
            state, problem = None, str(error)
        if isinstance(state, dict):
            self.load_state_dict(state)
        else:
            warn(
                f"{file} is damaged ({problem}): mimose starts this run without learned costs. "
                "Training continues"
            )
