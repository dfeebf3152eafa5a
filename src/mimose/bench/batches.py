"""What a batch is: its shape, its random content, and where shapes are drawn from.

A run is an epoch over samples drawn at random, and its last batch is half full. What is in a batch
changes neither memory nor time, so it is random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import torch

LENGTHS = Path(__file__).parent / "lengths"

Batch = dict[str, Any]
"""The arguments of a model's forward, by name."""


@dataclass(frozen=True, slots=True, order=True)
class BatchShape:
    """How many samples, and the size that they are padded to."""

    rows: int
    lengths: tuple[int, ...]
    """Of texts the padded length, or two for source and target; of images height and width."""
    images: tuple[tuple[int, int], ...] = ()
    """Height and width of each image before the model itself scales and pads them; empty where
    all samples of the batch have the same size."""


class RandomTensors:
    """Random tensors from a seed, without a draw from the common RNG.

    On the meta device they have a shape and no content.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self.host = Random(seed)
        """For single numbers that are needed on the host."""
        self._generator = None
        if device.type != "meta":
            self._generator = torch.Generator(device)
            self._generator.manual_seed(seed)

    def integers(self, high: int, *dims: int) -> torch.Tensor:
        """Whole numbers from 0 to `high`, which is not among them."""
        return torch.randint(0, high, dims, device=self._device, generator=self._generator)

    def uniform(self, *dims: int) -> torch.Tensor:
        """Numbers from 0 to 1."""
        return torch.rand(dims, device=self._device, generator=self._generator)


class Source(ABC):
    """Where the shapes of a task's batches come from."""

    axis: ClassVar[str]
    """What `extent` is, for the axis of a figure."""
    sides: ClassVar[int]
    """How many of the last dimensions of the model's input vary."""

    @abstractmethod
    def draw(self, random: Random, rows: int, *, small: bool) -> BatchShape:
        """The shape of a batch of so many samples drawn at random."""

    @abstractmethod
    def largest(self, shapes: Sequence[BatchShape]) -> BatchShape:
        """A full batch that needs as much memory as any of these."""

    @abstractmethod
    def longest(self, rows: int, *, small: bool) -> BatchShape:
        """The largest batch that the data could give, drawn in a run or not."""

    @abstractmethod
    def samples(self, shapes: Sequence[BatchShape], count: int | None = None) -> list[BatchShape]:
        """Full batches over the range of these shapes, the largest first.

        At most so many, or as many as are needed to know the range well.
        """

    @abstractmethod
    def extent(self, lengths: Sequence[int]) -> float:
        """One number for the size of a sample."""

    @abstractmethod
    def elements(self, shape: BatchShape) -> int:
        """How many tokens or pixels a batch has."""


def spread(low: int, high: int, count: int) -> list[int]:
    """So many whole numbers from high to low, without repetition."""
    return sorted({round(x) for x in np.linspace(low, high, count)}, reverse=True)
