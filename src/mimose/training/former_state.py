"""What blocks change besides buffers: attributes, and random generators of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mimose.execution import AllAttributes, AttributeSlot, FormerAttributes, Generator
from mimose.interception import BlockInterceptor


class FormerState:
    """The attributes that forwards of blocks are known to change, at one moment.

    Of a block that has not run yet, these are all attributes of its modules.
    """

    def __init__(self, interceptors: Sequence[BlockInterceptor] = ()) -> None:
        slots: list[AttributeSlot] = []
        self.generators: list[Generator] = []
        self._unexamined: list[AllAttributes] = []
        for interceptor in interceptors:
            side_effects = interceptor.side_effects
            if not interceptor.examined:
                module = interceptor.module_if_alive
                if module is None or not module.training:
                    continue
                everything = AllAttributes(module)
                side_effects = everything.side_effects()
                self._unexamined.append(everything)
            slots += side_effects.attributes
            self.generators += side_effects.generators
        self._attributes = FormerAttributes(slots)

    def overwritten(self) -> torch.Tensor | None:
        """A tensor that was too large to copy and has been changed in place."""
        return self._attributes.overwritten

    def give_back(self) -> None:
        self._attributes.restore()
        for everything in self._unexamined:
            everything.remove_new()
