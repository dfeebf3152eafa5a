"""A model's parameters, listed fast enough to do so in every step."""

from __future__ import annotations

import weakref
from itertools import chain

import torch
from torch import nn


class Parameters:
    """Lists a model's parameters ten times faster than `Module.parameters`.

    It remembers the `_parameters` dict of every module. So it notices replaced parameters
    (`load_state_dict(assign=True)`) at once, and added modules after `refresh`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._ids: list[int] = []
        self._unique: list[nn.Parameter] = []
        """The parameters at the last look, and their ids before duplicates were left out."""
        self.refresh()

    def refresh(self) -> None:
        """Notice modules that were added to the model or removed from it."""
        model = self._model()
        modules = [] if model is None else model.modules()
        self._dicts = [module._parameters for module in modules if module._parameters]

    def first(self) -> nn.Parameter | None:
        """The first parameter. Code that replaces parameters usually replaces all of them."""
        for parameters in self._dicts:
            for parameter in parameters.values():
                if parameter is not None:
                    return parameter
        return None

    def current(self) -> list[nn.Parameter]:
        """All parameters, each once. Do not change the list."""
        found = list(chain.from_iterable([table.values() for table in self._dicts]))
        ids = list(map(id, found))
        if ids != self._ids:
            self._ids = ids
            unique = dict(zip(ids, found, strict=True))
            self._unique = [p for p in unique.values() if p is not None]
        return self._unique


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, such as a transposed weight."""
    base = tensor._base
    of = tensor if base is None else base
    # Compare the type first, which is fast: isinstance(…, nn.Parameter) runs Python code.
    return type(of) is not torch.Tensor and isinstance(of, nn.Parameter)
