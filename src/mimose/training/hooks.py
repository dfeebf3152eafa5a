"""All that is attached to a model: interceptors on it and on its blocks, and what watches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from mimose.execution import is_distributed
from mimose.interception import (
    Attachment,
    Block,
    BlockInterceptor,
    BypassDetector,
    Director,
    RootInterceptor,
    RootOwner,
)
from mimose.training.ranks import Agreement
from mimose.training.rebuilt import Rebuilt

_RANKS_EVERY = 16
"""Steps after which it is asked again whether other ranks train, too."""


class Owner(Director, RootOwner, Protocol):
    """What is asked and told of a model's calls in training."""


class ModelHooks:
    """Attached to one model; holds it weakly."""

    def __init__(self, model: nn.Module, owner: Owner) -> None:
        self._owner = owner
        self._root = RootInterceptor(model, owner)
        self.attachment: Attachment | None = None
        self.agreement = Agreement([])
        self._rebuilt: Rebuilt | None = None
        self._tripwire = BypassDetector(model, [])
        self._asked = 0
        self._several = False

    @property
    def model(self) -> nn.Module:
        return self._root.module

    @property
    def interceptors(self) -> Sequence[BlockInterceptor]:
        return [] if self.attachment is None else self.attachment.interceptors

    def attach(self, blocks: list[Block]) -> None:
        """Intercept the calls of the model and of these blocks."""
        self.attachment = Attachment(self.model, blocks, self._owner)
        self.agreement = Agreement(self.attachment.interceptors)
        self._rebuilt = Rebuilt(self.model, self.attachment.interceptors)
        self._tripwire = BypassDetector(self.model, blocks)
        self._root.install()

    def detach(self) -> None:
        """The model is as it was before."""
        if self.attachment is not None:
            self.attachment.detach()
        self.attachment = self._rebuilt = None
        self.agreement = Agreement([])
        self._tripwire.close()
        self._root.remove()

    def step_opens(self) -> None:
        """A block is called in training: the model is not compiled as a whole."""
        self._tripwire.close()
        if self._asked % _RANKS_EVERY == 0:  # asking takes as long as a plan from the cache
            self._several = is_distributed()
        self._asked += 1

    @property
    def of_several_ranks(self) -> bool:
        return self._several

    @property
    def must_agree(self) -> bool:
        """Whether ranks must decide alike, because blocks issue collectives."""
        return self._several and self.agreement.needed is not None

    def rebuilt_blocks(self) -> list[str]:
        """The names of blocks that were exchanged for others since this was last asked."""
        return [] if self._rebuilt is None else self._rebuilt.since_last()
