"""The interceptors on a model and on its blocks, and the detectors of changes to the model."""

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

_STEPS_BETWEEN_RANK_CHECKS = 16
"""The number of steps between two checks of whether several ranks train."""


class Owner(Director, RootOwner, Protocol):
    """Decides how a model and its blocks are called in training."""


class ModelHooks:
    """The hooks on one model; holds the model weakly."""

    def __init__(self, model: nn.Module, owner: Owner) -> None:
        self._owner = owner
        self._root = RootInterceptor(model, owner)
        self.attachment: Attachment | None = None
        self.agreement = Agreement([])
        self._rebuilt: Rebuilt | None = None
        self._bypass_detector = BypassDetector(model, [])
        self._steps = 0
        self.of_several_ranks = False

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
        self._bypass_detector = BypassDetector(self.model, blocks)
        self._root.install()

    def detach(self) -> None:
        """Restore the model."""
        if self.attachment is not None:
            self.attachment.detach()
        self.attachment = self._rebuilt = None
        self.agreement = Agreement([])
        self._bypass_detector.close()
        self._root.remove()

    def step_opens(self) -> None:
        """A block was called in training, so the model is not compiled as a whole."""
        self._bypass_detector.close()
        if self._steps % _STEPS_BETWEEN_RANK_CHECKS == 0:  # takes as long as a cached plan
            self.of_several_ranks = is_distributed()
        self._steps += 1

    @property
    def must_agree(self) -> bool:
        """Whether ranks must make the same decisions, because blocks issue collectives."""
        return self.of_several_ranks and self.agreement.needed is not None

    def rebuilt_blocks(self) -> list[str]:
        """The names of blocks that were replaced since the last call."""
        return [] if self._rebuilt is None else self._rebuilt.since_last()
