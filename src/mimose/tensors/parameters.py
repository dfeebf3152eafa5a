"""A model's parameters, told in microseconds."""

from __future__ import annotations

import weakref

from torch import nn


class Parameters:
    """The places that hold a model's parameters, rather than the parameters.

    What has taken another's place (`load_state_dict(assign=True)`) is seen at once; what is in
    parts that were added is seen after `look_again`. `Module.parameters` sees both, and takes ten
    times as long: too long for every step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.look_again()

    def look_again(self) -> None:
        """Parts may have been added to the model, or taken from it."""
        model = self._model()
        parts = [] if model is None else model.modules()
        self._places = [part._parameters for part in parts if part._parameters]

    def first(self) -> nn.Parameter | None:
        """The first of them: who replaces parameters replaces all of them, as a rule."""
        return next((p for place in self._places for p in place.values() if p is not None), None)

    def now(self) -> list[nn.Parameter]:
        """Each of them once."""
        found = (p for place in self._places for p in place.values() if p is not None)
        return list({id(parameter): parameter for parameter in found}.values())
