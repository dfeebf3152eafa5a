"""The tensors that one recompute has made, until the backward has asked for each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mimose.errors import RecomputeError
from mimose.execution.saved_kinds import SavedKinds

REMEDY = (
    "The block ran differently the second time: look for state that it keeps outside its buffers, "
    "or exclude it from recomputing"
)


class AllThere(BaseException):
    """The last tensor that is needed is there. Not an Exception: a block's own `except` must not
    catch it."""


class RecomputedTensors:
    """Takes what a recompute saves, by number, and hands each tensor out once.

    The recompute's graph, in which no backward runs, gets the numbers instead, and no hook refers
    to the frame and its arguments: others may hold on to that graph for ever. torch's
    `ModuleTracker` does, and `FlopCounterMode` with it: its hooks refer to their own nodes.
    """

    __slots__ = ("_tensors", "_versions", "backward")

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self.backward: object = None
        """The backward that they were made for; None if it is over, or did not begin."""

    def __len__(self) -> int:
        return len(self._tensors)

    def clear(self) -> None:
        """Free what is left of them."""
        self._tensors.clear()
        self._versions.clear()
        self.backward = None

    def take(self, index: int) -> torch.Tensor | None:
        """Hand one out; None if it was handed out before."""
        tensor, self._tensors[index] = self._tensors[index], None
        return tensor

    def changed(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether one of them was changed in place since."""
        return tensor._version != self._versions[index]

    def packer(
        self, saved: SavedKinds, title: str, *, complete: bool, early_stop: bool, check: bool
    ) -> Callable[[torch.Tensor], int | torch.Tensor]:
        """What sees the tensors that a recompute saves, where its forward saved these kinds.

        If that was not `complete`, a backward inside the function asks.
        """
        tensors, versions, compare, owed = self._tensors, self._versions, saved.compare, len(saved)

        def repack(tensor: torch.Tensor) -> int | torch.Tensor:
            # Detached, or it would keep the recompute's graph alive, and with it every tensor.
            if tensor.requires_grad:
                tensor = tensor.detach()
            index = len(tensors)
            if index >= owed:
                if complete:
                    raise _too_many(title, owed)
                return tensor
            tensors.append(tensor)
            versions.append(tensor._version)
            if check:
                compare(index, tensor)
            if early_stop and index + 1 == owed:
                raise AllThere
            return index

        return repack

    def looker_up(self, title: str) -> Callable[[int | torch.Tensor], torch.Tensor]:
        """What gives a recompute's own graph its tensors, for a backward inside the function."""
        tensors = self._tensors

        def look_up(saved: int | torch.Tensor) -> torch.Tensor:
            if not isinstance(saved, int):
                return saved
            tensor = tensors[saved] if saved < len(tensors) else None
            if tensor is None:
                raise RecomputeError(
                    f"{title}: a second backward ran through what a recompute has made. {REMEDY}"
                )
            return tensor

        return look_up


def _too_many(title: str, saved: int) -> RecomputeError:
    return RecomputeError(
        f"{title}: trying to save more tensors during recomputation than during the original "
        f"forward pass ({saved}). {REMEDY}"
    )
